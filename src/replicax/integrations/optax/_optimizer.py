"""The optimizer, which trains variables with a transformation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp

from replicax import _context, _nest, checkpoint
from replicax._describing import described
from replicax._enums import GradientReduction, GradientReductionLike, VariableAggregation
from replicax._jax_compat import without_mesh
from replicax._typing import Nest
from replicax.checkpoint import Deferred, NameOf, ObjectEntries
from replicax.collectives import CommunicationOptions
from replicax.errors import (
    ForeignValue,
    InvalidArgument,
    InvalidType,
    ShapeMismatch,
    StructureMismatch,
)
from replicax.execution import Site, warn_once
from replicax.integrations.optax._extra import Extra
from replicax.integrations.optax._nests import (
    Given,
    Nests,
    by_name,
    names_of,
    of_nests,
    of_pairs,
    require_once,
    require_variable,
)
from replicax.integrations.optax._slots import Owner, StateStructure
from replicax.integrations.optax._update import call_update, like, shape_of, updated
from replicax.strategies import Strategy, get_replica_context, get_strategy
from replicax.values import Mirrored
from replicax.variables import (
    Variable,
    VariablePlacement,
    is_function,
    original_of,
    store_whole_array,
    value_and_grad,
    whole_array,
)

if TYPE_CHECKING:
    import optax


@final
class Optimizer:
    """An optimizer that trains variables with any Optax transformation.

    Create it in the strategy's scope, next to the variables.

    Args:
      tx: The transformation, such as `optax.adam(1e-3)`.
      name: The name in messages, and in the names of the optimizer's own variables.
      options: Options for summing gradients over the replicas; by default, in packs and exactly.
      reduction: The reduction of the replicas' gradients: "SUM", for losses that are divided by the
        size of the global batch; "MEAN", for losses that are means over the replica's own rows,
        weighted by the number of these rows where it is known; or "NONE", for gradients that are
        already equal on all replicas. By default, `strategy.gradient_reduction`: SUM.

    >>> import optax, replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     weight = rx.Variable(1.0)
    ...     optimizer = rx.Optimizer(optax.sgd(0.1))
    >>> def step(x):
    ...     loss, gradient = rx.value_and_grad(lambda: x * weight, weight)()
    ...     optimizer.apply_gradients([(gradient, weight)])
    >>> strategy.run(step, args=(2.0,))
    >>> round(float(weight), 3), int(optimizer.iterations)
    (0.6, 1)
    """

    def __init__(
        self,
        tx: optax.GradientTransformation | optax.MultiSteps,
        *,
        name: str = "Optimizer",
        options: CommunicationOptions | None = None,
        reduction: GradientReductionLike | None = None,
    ) -> None:
        if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
            raise InvalidType(
                "An Optimizer wraps an Optax transformation, such as `optax.adam(1e-3)`; got "
                f"{described(tx)}."
            )
        self._tx = tx
        self._name = name
        self._options = options
        self._reduction = None if reduction is None else GradientReduction.parse(reduction)
        self._trained: tuple[Variable, ...] | None = None  # in the order of the nests' leaves
        self._nests: Nests | None = None
        self._slots: list[Variable] = []
        self._state: StateStructure | None = None
        self._constraints: list[Any] = []
        self._step: Any = None
        self._restored: Deferred | None = None
        self._iterations = Variable(
            0,
            trainable=False,
            name=f"{name}/iterations",
            dtype=jnp.int32,
            aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
        )

    @property
    def iterations(self) -> Variable:
        """The number of times gradients have been applied."""
        return self._iterations

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The optimizer's own state: the iterations, and the slots once there are any."""
        return (self._iterations, *self._slots)

    @property
    def reduction(self) -> GradientReduction | None:
        """The reduction of gradients over the replicas, or None to use the strategy's."""
        return self._reduction

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]] | Nest,
        params: Nest = None,
        *,
        name: str | None = None,
        skip_gradients_aggregation: bool | None = None,
        experimental_aggregate_gradients: bool | None = None,
    ) -> None:
        """Update the variables with their gradients.

        In replica context the replicas meet, and their gradients are reduced first: summed, unless
        the optimizer or the strategy says otherwise. In cross-replica context the gradients are
        used as they are.

        The transformation sees the nests that were given, so masks and labels by path or by tree
        apply. Given pairs, it sees a dict keyed by the names of the variables.

        Args:
          grads_and_vars: Pairs of a gradient and its variable; the same variables every time. With
            `params`, a nest of gradients.
          params: A nest of variables, with the structure of the gradients, or a function that
            returns it; the same nest every time.
          name: Accepted for compatibility with the reference.
          skip_gradients_aggregation: Whether the gradients are already the same on all replicas,
            because they were summed by `all_reduce`, and perhaps clipped. By default they are not.
          experimental_aggregate_gradients: An older form of this argument: False is the same as
            `skip_gradients_aggregation=True`.
        """
        del name
        params = params() if is_function(params) else params
        skip = _skips(skip_gradients_aggregation, experimental_aggregate_gradients)
        if params is None:
            given = of_pairs(list(grads_and_vars))
        else:
            given = of_nests(grads_and_vars, params)
        self._reduce_and_apply(given, {}, skip)

    def update(
        self,
        gradients: Nest,
        params: Nest,
        *,
        skip_gradients_aggregation: bool | None = None,
        **extra: Nest,
    ) -> None:
        """Update a nest of variables with their gradients and the transformation's extra arguments.

        This is `apply_gradients(gradients, params)` with extra arguments.

        Args:
          gradients: A nest of gradients, with the structure of `params`. For `optax.lookahead`,
            with the structure of `params.fast`.
          params: A nest of variables, or a function that returns it.
          skip_gradients_aggregation: The same as for `apply_gradients`.
          extra: Arguments for `tx.update`, such as `value=loss` for
            `optax.contrib.reduce_on_plateau`. In replica context `value` and `grad` are reduced
            over the replicas as the gradients are; everything else must be the same on all of them.

        >>> import optax, replicax as rx
        >>> params = {"w": rx.Variable(3.0), "bias": rx.Variable(1.0)}
        >>> decayed = {"w": True, "bias": False}
        >>> optimizer = rx.Optimizer(optax.add_decayed_weights(0.5, mask=decayed))
        >>> optimizer.update({"w": 0.0, "bias": 0.0}, params)
        >>> float(params["w"]), float(params["bias"])
        (4.5, 1.0)
        """
        params = params() if is_function(params) else params
        given = of_nests(gradients, params)
        self._reduce_and_apply(given, extra, skip_gradients_aggregation)

    def minimize(
        self,
        loss: Callable[[], Nest],
        var_list: Nest,
        name: str | None = None,
        *,
        skip_gradients_aggregation: bool | None = None,
    ) -> jax.Array:
        """Compute the gradients of a loss, and update the variables with them.

        In replica context the gradients are reduced over the replicas, as `apply_gradients` does.

        Args:
          loss: A function without arguments that returns a scalar and reads the variables.
          var_list: The variables to update, as a list or another nest, or a function that returns
            them, which is called after the loss has been computed.
          name: Accepted for compatibility with the reference.
          skip_gradients_aggregation: The same as for `apply_gradients`.

        Returns:
          The loss before the update.

        >>> import optax, replicax as rx
        >>> weight = rx.Variable(3.0)
        >>> optimizer = rx.Optimizer(optax.sgd(0.5))
        >>> float(optimizer.minimize(lambda: weight**2, [weight])), float(weight)
        (9.0, 0.0)
        """
        if not callable(loss):
            raise InvalidType(
                "`loss` of `minimize` must be a function that computes it, since there is no tape; "
                f"got {described(loss)}. Write `lambda: loss_of(batch)`."
            )
        if not is_function(var_list):
            for leaf in _nest.leaves(var_list):
                require_variable(leaf)
        value, gradients = value_and_grad(loss, var_list)()
        self.apply_gradients(
            gradients,
            var_list,
            name=name,
            skip_gradients_aggregation=skip_gradients_aggregation,
        )
        return value

    def __deepcopy__(self, memo: dict[int, object]) -> Optimizer:
        """Create an optimizer with a state of its own, for copies of the variables.

        If it is first given the original variables, it trains those instead.
        """
        memo[id(self)] = copied = object.__new__(type(self))
        copied.__dict__.update(
            self.__dict__,
            _iterations=copy.deepcopy(self._iterations, memo),
            _slots=[copy.deepcopy(slot, memo) for slot in self._slots],
            _trained=copy.deepcopy(self._trained, memo),
        )
        return copied

    @without_mesh
    def _reduce_and_apply(self, given: Given, extra: dict[str, Nest], skip: bool | None) -> None:
        self._check(given)
        replica = get_replica_context()
        if replica is None or replica.strategy is not get_strategy():
            self._apply(given, given.gradients, extra)
            return
        functions = [name for name in extra if Extra.has_functions({name: extra[name]})]
        if functions and replica.strategy.identity is not None:
            raise InvalidArgument(
                f"`update` of {self._name!r} got `{functions[0]}` in a function given to `run`: a "
                "function of the params (for a line search, say), for which every replica would "
                "see its own part of the batch. Use a transformation without one, such as "
                "`optax.lbfgs(linesearch=None)`, or update outside of `run`."
            )
        split = Extra.of(extra)

        def apply(strategy: Strategy, reduced: list[Any], shared: list[Any]) -> None:
            count = len(given.gradients)
            self._apply(given, reduced[:count], split.joined(reduced[count:], shared))

        replica.merge_gradients(
            f"apply_gradients of {self._name!r} to {names_of(given.variables)}",
            apply,
            [*given.gradients, *split.of_the_loss],
            shared=split.shared,
            reduction=self._reduction_for(skip),
            options=self._options,
            subjects=(self, *given.params),
            report=self._warn if skip is None else None,
        )

    def _reduction_for(self, skip: bool | None) -> GradientReduction | None:
        """Return the reduction for this call, or None to use the strategy's."""
        if skip:
            return GradientReduction.NONE
        if skip is False and self._reduction is GradientReduction.NONE:
            return GradientReduction.SUM
        return self._reduction

    def _warn(self, site: Site) -> None:
        warn_once(
            self,
            f"`apply_gradients` of {self._name!r}",
            "If that is not meant, say `skip_gradients_aggregation=True`, or give the optimizer "
            '`reduction="NONE"`; if it is, `skip_gradients_aggregation=False`.',
            site,
        )

    def _apply(self, given: Given, gradients: Sequence[Nest], extra: dict[str, Nest]) -> None:
        placement = get_strategy().placement
        nests, trained = self._arranged(given)
        slots, state = self._slots, self._state
        if self._trained is None or state is None:
            slots, state = self._make_slots(nests, trained, extra)
        constraints = [variable.constraint for variable in trained]
        if (nests, state, constraints) != (self._nests, self._state, self._constraints):
            # The program of a step depends on these.
            self._nests, self._state, self._constraints = nests, state, constraints
            self._step = None
        own = (self._iterations, *slots)
        if placement.sends_updates:
            self._send_update(placement, given, gradients, own, trained, extra)
            self._finish(trained, slots)
            return
        values = {variable: whole_array(variable) for variable in given.params}
        program = _context.current().program
        if program is not None and program.skips_computing():
            for variable in (*trained, *own):
                store_whole_array(variable, whole_array(variable))
            self._trained, self._slots = trained, slots
            return
        of_variable = dict(zip(given.variables, gradients, strict=True))
        topology = get_strategy().topology
        ordered = [trained[index] for index in nests.differentiated]
        # One call of one program updates all copies: 0.5 ms for six variables on two devices.
        # Calling an update function for each copy of each variable takes 3 ms.
        step = self._stepping(extra)
        new_values, new_state = step(
            [like(of_variable[variable], values[variable], topology) for variable in ordered],
            [whole_array(variable) for variable in own],
            [values[variable] for variable in trained],
            Extra.placed(extra, lambda value: like(value, values[trained[0]], topology)),
        )
        for variable, value in zip((*trained, *own), (*new_values, *new_state), strict=True):
            store_whole_array(variable, value)
        self._finish(trained, slots)

    def _finish(self, trained: tuple[Variable, ...], slots: list[Variable]) -> None:
        """Note what the step was for; restored values have found their slots now."""
        self._trained, self._slots = trained, slots
        if self._restored is not None:
            self._restored.finish()
            self._restored = None

    def _send_update(
        self,
        placement: VariablePlacement,
        given: Given,
        gradients: Sequence[Nest],
        own: Sequence[Variable],
        trained: Sequence[Variable],
        extra: dict[str, Nest],
    ) -> None:
        """Have the variables updated where they are, each with its own part of the step."""
        if extra:
            raise InvalidArgument(
                f"`update` of {self._name!r} got {', '.join(map(repr, extra))}, and its variables "
                f"are updated by {get_strategy()!r}, each by itself. Use a transformation without "
                "extra arguments."
            )
        tx, nests, state, constraints = self._tx, self._nests, self._state, self._constraints
        assert nests is not None
        assert state is not None
        count = len(trained)

        def step(values: list[jax.Array], gradients: list[jax.Array]) -> list[jax.Array]:
            new_values, new_state = updated(
                tx, nests, state, constraints, gradients, values[count:], values[:count], {}
            )
            return [*new_values, *new_state]

        of_variable = dict(zip(given.variables, gradients, strict=True))
        ordered = [trained[index] for index in nests.differentiated]
        operands = [
            jnp.asarray(value.primary if isinstance(value, Mirrored) else value)
            for value in (of_variable[variable] for variable in ordered)
        ]
        placement.send_update((*trained, *own), step, operands, ordered)

    def _stepping(self, extra: dict[str, Nest]) -> Any:
        """Return the function of a step, compiled unless a function is among its arguments."""
        tx, nests, state, constraints = self._tx, self._nests, self._state, self._constraints
        assert nests is not None
        assert state is not None

        def step(*arguments: Nest) -> tuple[Any, Any]:
            return updated(tx, nests, state, constraints, *arguments)

        if Extra.has_functions(extra):
            return step
        if self._step is None:
            self._step = jax.jit(step)
        return self._step

    def _arranged(self, given: Given) -> tuple[Nests, tuple[Variable, ...]]:
        """Return the nests of the transformation, and the variables in their order."""
        if self._trained is None or self._nests is None:
            if given.nests is None:
                return by_name(given.params)
            return given.nests, given.params
        trained = self._same(given.params)
        if given.nests is not None and not (
            given.nests.same_places(self._nests)
            and all(a is b for a, b in zip(trained, given.params, strict=True))
        ):
            raise StructureMismatch(
                f"{self._name!r} was given its variables as {self._nests} at first, and as "
                f"{given.nests} now. Give it the same nest every time, or (gradient, variable) "
                "pairs, whose order does not matter."
            )
        return self._nests, trained

    def _same(self, variables: Sequence[Variable]) -> tuple[Variable, ...]:
        """Return the variables that this optimizer trains; `variables` must be all of them."""
        trained = self._trained
        assert trained is not None
        given = {id(variable) for variable in variables}
        if given == {id(variable) for variable in trained}:
            return trained
        originals = [original_of(variable) for variable in trained]
        if given == {id(variable) for variable in originals}:
            return tuple(variable for variable in originals if variable is not None)
        raise InvalidArgument(
            f"{self._name!r} trains {names_of(trained)}, and was given gradients for "
            f"{names_of(variables)}. Give it the same variables every time, or use an optimizer "
            "for each set."
        )

    def _make_slots(
        self, nests: Nests, variables: Sequence[Variable], extra: dict[str, Nest]
    ) -> tuple[list[Variable], StateStructure]:
        """Create the optimizer's state as variables, each placed like the variable it is for."""
        # They are created immediately, even while a program is traced: slots are variables with
        # initial values.
        strategy = get_strategy()
        structures: list[StateStructure] = []
        split = Extra.of(extra)
        numbers = [*split.of_the_loss, *split.shared]
        count = len(split.of_the_loss)

        def make(*values: Any) -> list[jax.Array]:
            params = jax.tree.unflatten(nests.params, values)

            def update(state: Any, *numbers: jax.Array) -> Any:
                zeros = [jnp.zeros_like(values[index]) for index in nests.differentiated]
                gradients = jax.tree.unflatten(nests.gradients, zeros)
                joined = split.joined(numbers[:count], numbers[count:])
                return call_update(self._tx, gradients, state, params, joined)[1]

            structure, arrays = StateStructure.after_update(
                self._tx.init(params), update, [shape_of(number) for number in numbers]
            )
            structures.append(structure)
            return arrays

        arrays = strategy.placement.initial(make, *variables)
        structure = structures[-1]
        slots = []
        for path, array in zip(structure.paths, arrays, strict=True):
            owner = Owner.of(path, jnp.shape(array), nests.paths, variables)
            if self._restored is not None:
                name = owner.checkpoint_name(self._restored.name_of, path)
                restored = self._restored.take(name, jnp.shape(array), jnp.result_type(array))
                array = array if restored is None else restored
            owned = owner.variable if owner.variable is not None else variables[0]
            with strategy.extended.colocate_vars_with(owned):
                of = "" if owner.variable is None else owner.variable.name
                name = f"{self._name}/{of}{owner.path}"
                slots.append(Variable(array, trainable=False, name=name))
        return slots, structure

    def _list_entries(self, name_of: NameOf) -> ObjectEntries:
        """Return the entries for a checkpoint. Slots not created yet are restored later."""
        entries = {"iterations": checkpoint.entry_of(self._iterations)}
        trained, nests, state = self._trained, self._nests, self._state
        if trained is not None and nests is not None and state is not None:
            for path, slot in zip(state.paths, self._slots, strict=True):
                owner = Owner.of(path, slot.shape, nests.paths, trained)
                entries[owner.checkpoint_name(name_of, path)] = checkpoint.entry_of(slot)
            return ObjectEntries(entries)

        def defer(deferred: Deferred) -> None:
            self._restored = deferred

        waiting = {} if self._restored is None else self._restored.renamed(name_of)
        return ObjectEntries(entries, defer, waiting)

    def _check(self, given: Given) -> None:
        if not given.gradients:
            raise InvalidArgument("`apply_gradients` got no gradients.")
        strategy = get_strategy()
        if not strategy.extended.variable_created_in_scope(self._iterations):
            raise ForeignValue(
                f"`apply_gradients` runs under {strategy!r}, but {self._name!r} was created by "
                f"{self._iterations.strategy or 'no strategy'}. Create the optimizer in the "
                "strategy's scope, next to the variables."
            )
        for gradient, variable in zip(given.gradients, given.variables, strict=True):
            if gradient is None:
                raise InvalidArgument(
                    f"Variable {variable.name!r} has no gradient (None). Leave it out."
                )
            shape = jnp.shape(gradient)
            if shape != variable.shape:
                raise ShapeMismatch(
                    f"Variable {variable.name!r} has shape {variable.shape}, its gradient {shape}."
                )
        for variable in given.params:
            if not strategy.extended.variable_created_in_scope(variable):
                raise ForeignValue(
                    f"`apply_gradients` runs under {strategy!r}, but variable {variable.name!r} "
                    f"was created by {variable.strategy or 'no strategy'}. Create it in the "
                    "strategy's scope, and apply gradients in that scope or in `run`."
                )
        require_once(given.params)


def _skips(skip: bool | None, aggregate: bool | None) -> bool | None:
    """Return whether to skip summing gradients, or None if neither argument was given."""
    if skip is not None and aggregate is not None and skip == aggregate:
        raise InvalidArgument(
            f"`apply_gradients` got skip_gradients_aggregation={skip} and "
            f"experimental_aggregate_gradients={aggregate}, which contradict each other. Give one."
        )
    return skip if aggregate is None else not aggregate


checkpoint.register(
    checkpoint.TypeHandler(
        lambda thing: isinstance(thing, Optimizer), Optimizer._list_entries, names_variables=True
    )
)
