"""Optax transformations as optimizers of variables."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
from jax.core import Tracer

from replicax import _nest, checkpoint
from replicax._describing import described
from replicax._enums import ReduceOp, VariableAggregation
from replicax._typing import Nest
from replicax.checkpoint import Deferred, NameOf, TakenApart
from replicax.collectives import CommunicationOptions
from replicax.errors import (
    ForeignValue,
    InvalidArgument,
    InvalidType,
    ShapeMismatch,
    StructureMismatch,
    SummedTwice,
)
from replicax.execution import ReplicaContext
from replicax.strategies import Strategy, get_replica_context, get_strategy
from replicax.topology import Topology
from replicax.values import Mirrored, PerReplica
from replicax.variables import Variable, is_function, value_and_grad

if TYPE_CHECKING:
    import optax


@final
class Optimizer:
    """Trains variables with any Optax transformation.

    Create it in the strategy's scope, next to the variables.

    Args:
      tx: The transformation, such as `optax.adam(1e-3)`.
      name: For messages, and for the names of the optimizer's own variables.
      options: How gradients are summed over the replicas; by default in packs, and exactly.

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
        tx: optax.GradientTransformation,
        *,
        name: str = "Optimizer",
        options: CommunicationOptions | None = None,
    ) -> None:
        if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
            raise InvalidType(
                "An Optimizer wraps an Optax transformation, such as `optax.adam(1e-3)`; got "
                f"{described(tx)}."
            )
        self._tx = tx
        self._name = name
        self._options = options
        self._trained: tuple[Variable, ...] | None = None
        self._slots: list[Variable] = []
        self._structure: Any = None
        self._slot_paths: list[Any] = []
        self._constraints: list[Any] = []
        self._restored: Deferred | None = None
        self._warned = False
        self._iterations = Variable(
            0,
            trainable=False,
            name=f"{name}/iterations",
            dtype=jnp.int32,
            aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
        )

    @property
    def iterations(self) -> Variable:
        """How many times gradients have been applied."""
        return self._iterations

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The optimizer's own state: the iterations, and the slots once there are any."""
        return (self._iterations, *self._slots)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]] | Nest,
        params: Nest = None,
        *,
        name: str | None = None,
        skip_gradients_aggregation: bool | None = None,
        experimental_aggregate_gradients: bool | None = None,
    ) -> None:
        """Change the variables by their gradients.

        In replica context the replicas meet, and their gradients are summed first. In
        cross-replica context the gradients are taken as they are.

        Args:
          grads_and_vars: Pairs of a gradient and its variable; the same variables every time. With
            `params`, a nest of gradients.
          params: A nest of variables, of the structure of the gradients, or a function that returns
            it.
          name: Accepted for the sake of programs written for the reference.
          skip_gradients_aggregation: Whether the gradients are the same on all replicas already,
            because they were summed by `all_reduce`, and clipped perhaps. By default they are not.
          experimental_aggregate_gradients: The older way to say it: False is the same as
            `skip_gradients_aggregation=True`.
        """
        del name
        params = params() if is_function(params) else params
        pairs = list(grads_and_vars) if params is None else _paired(grads_and_vars, params)
        gradients, variables = self._checked(pairs)
        skip = _skips(skip_gradients_aggregation, experimental_aggregate_gradients)
        replica = get_replica_context()
        if replica is None or replica.strategy is not get_strategy():
            self._apply(gradients, variables)
            return
        if skip is None:
            self._warn_of_reduced(replica, gradients, variables)
        replica.merge(
            f"apply_gradients of {self._name!r} to {_names(variables)}",
            functools.partial(self._merge_and_apply, variables=variables, skip=bool(skip)),
            gradients,
            subjects=(self, *variables),
        )

    def minimize(
        self,
        loss: Callable[[], Any],
        var_list: Nest,
        name: str | None = None,
        *,
        skip_gradients_aggregation: bool | None = None,
    ) -> jax.Array:
        """Compute the gradients of a loss, and change the variables by them.

        In replica context the gradients are summed over the replicas, as `apply_gradients` does.

        Args:
          loss: A function without arguments that returns a scalar and reads the variables.
          var_list: The variables to change, as a list or another nest, or a function that returns
            them, which is asked when the loss has been computed.
          name: Accepted for the sake of programs written for the reference.
          skip_gradients_aggregation: As of `apply_gradients`.

        Returns:
          The loss, before the variables were changed.

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
        for leaf in [] if is_function(var_list) else _nest.leaves(var_list):
            _require_variable(leaf)
        value, gradients = value_and_grad(loss, var_list)()
        self.apply_gradients(
            gradients,
            var_list,
            name=name,
            skip_gradients_aggregation=skip_gradients_aggregation,
        )
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        """Create an optimizer with a state of its own, for copies of the variables.

        Or for the variables themselves, if it is given these first.
        """
        memo[id(self)] = copied = object.__new__(type(self))
        copied.__dict__.update(
            self.__dict__,
            _iterations=copy.deepcopy(self._iterations, memo),
            _slots=[copy.deepcopy(slot, memo) for slot in self._slots],
            _trained=copy.deepcopy(self._trained, memo),
        )
        copied.__dict__.pop("_step", None)  # a compiled function, of this one's structure
        return copied

    def _merge_and_apply(
        self,
        strategy: Strategy,
        *gradients: PerReplica,
        variables: Sequence[Variable],
        skip: bool,
    ) -> None:
        if skip:
            self._apply([gradient.agreed() for gradient in gradients], variables)
            return
        pairs = list(zip(gradients, variables, strict=True))
        reduced = strategy.extended.batch_reduce_to(ReduceOp.SUM, pairs, options=self._options)
        self._apply(reduced, variables)

    def _warn_of_reduced(
        self, replica: ReplicaContext, gradients: Sequence[Any], variables: Sequence[Variable]
    ) -> None:
        for gradient, variable in zip(gradients, variables, strict=True):
            if replica.has_reduced(gradient) and not self._warned:
                self._warned = True
                warnings.warn(
                    f"`apply_gradients` of {self._name!r} got a gradient of variable "
                    f"{variable.name!r} that is a result of `all_reduce`, and sums it over the "
                    "replicas once more. If that is not meant, say "
                    "`apply_gradients(..., skip_gradients_aggregation=True)`; if it is, `False`.",
                    SummedTwice,
                    stacklevel=3,
                )

    def _apply(self, gradients: Sequence[Any], variables: Sequence[Variable]) -> None:
        pairs = {
            variable: (gradient, variable.cross_replica_array())
            for gradient, variable in zip(gradients, variables, strict=True)
        }
        self._require_same(variables)
        trained = self._trained or tuple(variables)
        slots = self._slots
        if self._trained is None:
            slots, self._structure = self._make_slots(trained)
        constraints = [variable.constraint for variable in trained]
        if constraints != self._constraints:  # which the program of a step has in it
            self._constraints = constraints
            self.__dict__.pop("_step", None)
        own = (self._iterations, *slots)
        ordered = [pairs[variable] for variable in trained]
        # All copies change by one program, in one call: 0.5 ms for six variables on two devices.
        # An update function for each copy of each variable takes 3 ms.
        new_values, new_state = self._step(
            [_like(gradient, value, get_strategy().topology) for gradient, value in ordered],
            [variable.cross_replica_array() for variable in own],
            [value for _, value in ordered],
        )
        for variable, value in zip((*trained, *own), (*new_values, *new_state), strict=True):
            variable.store_cross_replica_array(value)
        self._trained, self._slots = trained, slots
        if self._restored is not None:
            self._restored.settle()
            self._restored = None

    @functools.cached_property
    def _step(self) -> Any:
        import optax  # here, because importing replicax should not take its 0.4 s

        constraints = self._constraints

        def step(gradients: Any, state: Any, values: Any) -> tuple[Any, Any]:
            iterations, *slots = state
            updates, new_slots = self._tx.update(
                gradients, jax.tree.unflatten(self._structure, slots), values
            )
            moved: Any = optax.apply_updates(values, updates)
            new_values = [
                value if constraint is None else jnp.asarray(constraint(value), value.dtype)
                for value, constraint in zip(moved, constraints, strict=True)
            ]
            return new_values, [iterations + 1, *jax.tree.leaves(new_slots)]

        return jax.jit(step)

    def _require_same(self, variables: Sequence[Variable]) -> None:
        trained = self._trained
        given = {id(variable) for variable in variables}
        if trained is not None and given != {id(variable) for variable in trained}:
            originals = [variable.copied_from() for variable in trained]
            if given == {id(variable) for variable in originals}:
                self._trained = tuple(v for v in originals if v is not None)
                return
            raise InvalidArgument(
                f"{self._name!r} trains {_names(trained)}, and was given gradients for "
                f"{_names(variables)}. Give it the same variables every time, or use an optimizer "
                "for each set."
            )

    def _make_slots(self, variables: Sequence[Variable]) -> tuple[list[Variable], Any]:
        """The optimizer's state as variables, each where its variable is."""
        # Now, also while a program is traced: slots are variables, and start with numbers.
        strategy = get_strategy()
        state = strategy.placement.initial(lambda *values: self._tx.init([*values]), *variables)
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        slots = []
        self._slot_paths = [path for path, _ in leaves]
        for path, leaf in leaves:
            owner = _owner(path, leaf, variables)
            if self._restored is not None:
                name = _slot_name(path, leaf, variables, self._restored.name_of)
                restored = self._restored.take(name, jnp.shape(leaf), jnp.result_type(leaf))
                leaf = leaf if restored is None else restored
            with strategy.extended.colocate_vars_with(owner):
                name = f"{self._name}/{owner.name}{jax.tree_util.keystr(path)}"
                slots.append(Variable(leaf, trainable=False, name=name))
        return slots, structure

    def take_apart(self, name_of: NameOf) -> TakenApart:
        """What a checkpoint holds of it. Slots that do not exist yet are restored when made."""
        parts = {"iterations": checkpoint.part_of(self._iterations)}
        trained = self._trained
        if trained is not None:
            for path, slot in zip(self._slot_paths, self._slots, strict=True):
                parts[_slot_name(path, slot, trained, name_of)] = checkpoint.part_of(slot)
            return TakenApart(parts)

        def defer(deferred: Deferred) -> None:
            self._restored = deferred

        waiting = {} if self._restored is None else self._restored.renamed(name_of)
        return TakenApart(parts, defer, waiting)

    def _checked(self, pairs: list[tuple[Any, Variable]]) -> tuple[list[Any], tuple[Variable, ...]]:
        if not pairs:
            raise InvalidArgument("`apply_gradients` got no gradients.")
        strategy = get_strategy()
        if not strategy.extended.variable_created_in_scope(self._iterations):
            raise ForeignValue(
                f"`apply_gradients` runs under {strategy!r}, but {self._name!r} was created by "
                f"{self._iterations.strategy or 'no strategy'}. Create the optimizer in the "
                "strategy's scope, next to the variables."
            )
        for gradient, variable in pairs:
            _require_variable(variable)
            if gradient is None:
                raise InvalidArgument(
                    f"Variable {variable.name!r} has no gradient (None). Leave it out."
                )
            if not strategy.extended.variable_created_in_scope(variable):
                raise ForeignValue(
                    f"`apply_gradients` runs under {strategy!r}, but variable {variable.name!r} "
                    f"was created by {variable.strategy or 'no strategy'}. Create it in the "
                    "strategy's scope, and apply gradients in that scope or in `run`."
                )
            shape = jnp.shape(gradient)
            if shape != variable.shape:
                raise ShapeMismatch(
                    f"Variable {variable.name!r} has shape {variable.shape}, its gradient {shape}."
                )
        if len({id(variable) for _, variable in pairs}) < len(pairs):
            raise InvalidArgument(
                "`apply_gradients` got a variable twice: "
                f"{_names([variable for _, variable in pairs])}. Add its gradients first."
            )
        return [gradient for gradient, _ in pairs], tuple(variable for _, variable in pairs)


def _require_variable(value: Any) -> None:
    if not isinstance(value, Variable):
        raise InvalidType(
            "`apply_gradients` takes (gradient, variable) pairs, of `rx.Variable`s; got "
            f"{described(value)} in the place of a variable."
        )


def _paired(gradients: Nest, params: Nest) -> list[tuple[Any, Any]]:
    """Return the pairs of two nests of one structure."""
    given, structure = _nest.flatten(gradients)
    variables, other = _nest.flatten(params)
    if structure != other:
        raise StructureMismatch(
            f"`apply_gradients` got gradients of the structure {structure}, and variables of the "
            f"structure {other}. Give one gradient for each variable, in the same nest."
        )
    return list(zip(given, variables, strict=True))


def _skips(skip: bool | None, aggregate: bool | None) -> bool | None:
    """Return whether gradients are not to be summed; None if nothing was said."""
    if skip is not None and aggregate is not None and skip == aggregate:
        raise InvalidArgument(
            f"`apply_gradients` got skip_gradients_aggregation={skip} and "
            f"experimental_aggregate_gradients={aggregate}, which contradict each other. Give one."
        )
    return skip if aggregate is None else not aggregate


def _like(gradient: Any, value: jax.Array, topology: Topology) -> jax.Array:
    """The gradient on the devices of the variable, which is one of a strategy over `topology`."""
    if isinstance(gradient, Mirrored) and gradient.topology is not None:
        gradient = gradient.array(gradient.topology)
    if isinstance(value, Tracer):
        return jnp.asarray(gradient)
    if isinstance(gradient, jax.Array) and gradient.sharding == value.sharding:
        return gradient
    if topology.spans_processes:
        return topology.replicate(gradient)
    return jax.device_put(gradient, value.sharding) if value.committed else jnp.asarray(gradient)


def _owner(path: Sequence[Any], leaf: Any, variables: Sequence[Variable]) -> Variable:
    """The variable that a leaf of the Optax state belongs to; the first, if to none.

    Optax mirrors the list of variables in its state, so a slot's path ends with an index.
    """
    index = getattr(path[-1], "idx", None) if path else None
    if index is not None and index < len(variables) and variables[index].shape == jnp.shape(leaf):
        return variables[index]
    return variables[0]


def _slot_name(
    path: Sequence[Any], leaf: Any, variables: Sequence[Variable], name_of: NameOf
) -> str:
    """How a checkpoint calls a leaf of the Optax state.

    By the variable that it is for, if the checkpoint has that too, so that it is found again when
    variables come in another order.
    """
    owner = _owner(path, leaf, variables)
    index = getattr(path[-1], "idx", None) if path else None
    own = index is not None and index < len(variables) and variables[index] is owner
    name = name_of(owner) if own else None
    if name is None:
        return f"slots/{jax.tree_util.keystr(tuple(path))}"
    return f"slots/{jax.tree_util.keystr(tuple(path[:-1]))}/{name}"


def _names(variables: Sequence[Variable]) -> str:
    return ", ".join(repr(variable.name) for variable in variables)


checkpoint.register(
    checkpoint.Kind(
        lambda thing: isinstance(thing, Optimizer), Optimizer.take_apart, names_variables=True
    )
)
