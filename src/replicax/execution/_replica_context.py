"""The replica context: everything that a replica can do together with the others."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from replicax import _context, _nest
from replicax._context import ContextKind
from replicax._enums import GradientReduction, ReduceOp, ReduceOpLike
from replicax._nest import AlwaysLeaf
from replicax._typing import ArrayLike, Leaf, Nest, Values
from replicax.collectives import (
    CommunicationOptions,
    Hints,
    agree_on_unknown_shapes,
    merge_options,
    reduction_of,
    require_numeric,
)
from replicax.errors import ContextError
from replicax.execution._executor import require_call
from replicax.execution._gradient_reduction import combined, weighted
from replicax.execution._summed_twice import Report, Site, are_equal, users_line
from replicax.values import Mirrored, PerReplica
from replicax.variables import Variable

if TYPE_CHECKING:
    from replicax._typing import StrategyLike
    from replicax.strategies import Strategy
    from replicax.topology import DeviceOrSharding


@dataclass(frozen=True, slots=True)
class Meeting:
    """The function and the arguments that a replica brings to a meeting.

    `label` and `subjects` describe the meeting; those of all replicas must agree.
    """

    label: str
    fn: Callable[..., Nest]
    arguments: tuple[tuple[Nest, ...], dict[str, Nest]]
    always_wrap: bool = False
    subjects: tuple[object, ...] = ()

    def agrees_with(self, other: Meeting) -> bool:
        return (
            self.label == other.label
            and len(self.subjects) == len(other.subjects)
            and all(
                a is b or (not isinstance(a, AlwaysLeaf) and a == b)
                for a, b in zip(self.subjects, other.subjects, strict=True)
            )
        )


class Merger(ABC):
    """The way the replicas of one `run` meet: the only thing that an execution must provide."""

    @abstractmethod
    def merge(self, local_index: int, meeting: Meeting) -> Nest:
        """Wait for all replicas, call `meeting.fn(strategy, ...)` once, and hand out the result.

        The arguments are merged over the replicas by `regroup`.
        """

    @abstractmethod
    def once(self, local_index: int, label: str, make: Callable[[], Values]) -> Values:
        """Call `make` once for all replicas, in cross-replica context; hand out the result.

        The first replica makes the call when it gets there, and does not wait for the others.
        """

    def watch(self, gradients: list[Nest], report: Report) -> list[object] | None:
        """Mark gradients that are about to be summed, so that those reduced before are reported.

        Return the marked ones, or None if they are numbers, which can be compared at once.
        """
        return None


@final
class ReplicaContext:
    """One replica of a strategy, from the point of view of the code that it runs.

    `rx.get_replica_context()` returns it inside the function given to `strategy.run`.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> def total(strategy, value):
    ...     return strategy.reduce("SUM", value, axis=None)
    >>> def step():
    ...     context = rx.get_replica_context()
    ...     return context.merge_call(total, args=(context.replica_id_in_sync_group + 1.0,))
    >>> [float(x) for x in strategy.experimental_local_results(strategy.run(step))]
    [3.0, 3.0]
    """

    def __init__(
        self,
        strategy: Any,
        merger: Merger,
        replica_id: int | jax.Array,
        local_index: int,
        num_replicas: int,
        devices: tuple[jax.Device, ...],
        row_weight: Callable[[], float | jax.Array] = lambda: 1.0,
    ) -> None:
        self._strategy: Strategy = strategy
        self._identity: StrategyLike | None = strategy.identity
        self._merger = merger
        self._replica_id = replica_id
        self._local_index = local_index
        self._num_replicas = num_replicas
        self._devices = devices
        self._row_weight = row_weight
        self._reduced: list[weakref.ref[jax.Array]] = []  # what `all_reduce` has returned here
        self._reduced_shapes: set[tuple[int, ...]] = set()

    @property
    def strategy(self) -> Strategy:
        """The strategy whose replica this is."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int | jax.Array:
        """The number of this replica, from 0 to `num_replicas_in_sync - 1`."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that work together."""
        return self._num_replicas

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of this replica; several if it has logical devices."""
        return self._devices

    @property
    def sharding(self) -> DeviceOrSharding:
        """The device, or the sharding, of this replica's arrays."""
        return self._strategy.topology.local_shardings[self._local_index]

    @property
    def local_index(self) -> int:
        """The number of this replica among those of this process."""
        return self._local_index

    def merge_call(
        self,
        fn: Callable[..., Values],
        args: Sequence[Nest] = (),
        kwargs: Mapping[str, Nest] | None = None,
    ) -> Values:
        """Call `fn(strategy, *args, **kwargs)` once, in cross-replica context, for all replicas.

        Values that differ between the replicas reach `fn` as `PerReplica`. Every replica gets the
        result of `fn`, with its own component in place of each distributed value.
        """
        require_call("merge_call", fn, args)
        label = f"merge_call({getattr(fn, '__qualname__', repr(fn))})"
        return self._meet(Meeting(label, fn, (tuple(args), dict(kwargs or {}))))

    @overload
    def all_reduce(
        self,
        op: ReduceOpLike,
        value: ArrayLike,
        options: Hints = None,
        *,
        experimental_hints: Hints = None,
    ) -> jax.Array: ...
    @overload
    def all_reduce(
        self,
        op: ReduceOpLike,
        value: Values,
        options: Hints = None,
        *,
        experimental_hints: Hints = None,
    ) -> Values: ...
    def all_reduce(
        self,
        op: ReduceOpLike,
        value: Nest,
        options: Hints = None,
        *,
        experimental_hints: Hints = None,
    ) -> Nest:
        """Combine a nest of arrays over the replicas; all of them get the result.

        It is differentiable. The gradient of SUM and MEAN is the `all_reduce` of the replicas'
        gradients with the same op; that of MAX and MIN is the sum of the replicas' gradients where
        this replica's value was chosen, shared between replicas with equal values.
        """
        op = ReduceOp.parse(op)
        usual = self._strategy.extended.communication_options
        merged = merge_options(options, experimental_hints, usual)
        leaves, structure = self._numeric_leaves(value, f"all_reduce({op.value})", op)
        results = self._reduce(op, leaves, structure, merged)
        if self._num_replicas > 1:  # the default strategy's context lives forever
            alive = [each for each in self._reduced if each() is not None]
            self._reduced = [*alive, *map(weakref.ref, results)]
            self._reduced_shapes.update(np.shape(each) for each in results)
        return jax.tree.unflatten(structure, results)

    def _reduce(
        self,
        op: ReduceOp,
        leaves: list[jax.Array],
        structure: object,
        options: CommunicationOptions,
    ) -> list[jax.Array]:
        """Combine the replicas' leaves of one structure."""

        def collective(arrays: list[jax.Array]) -> list[jax.Array]:
            def reduce(strategy: StrategyLike, *values: PerReplica) -> list[Mirrored]:
                return strategy.collectives.reduce(op, values, options)

            return self.merge(f"all_reduce({op.value})", reduce, arrays, (structure,))

        def gradient(arrays: list[jax.Array], cotangents: list[jax.Array]) -> list[jax.Array]:
            reduction = reduction_of(op)
            if reduction.linear:
                return self._reduce(op, cotangents, structure, options)
            totals = self._reduce(ReduceOp.SUM, cotangents, structure, options)
            everyones = self.all_gather([array[None] for array in arrays], 0, options)
            return [
                reduction.gradient(components, total)[self._replica_id]
                for components, total in zip(everyones, totals, strict=True)
            ]

        return _differentiable(collective, gradient, leaves)

    def merge_gradients(
        self,
        label: str,
        fn: Callable[..., Nest],
        gradients: Sequence[object],
        *,
        shared: Sequence[object] = (),
        reduction: GradientReduction | None = None,
        options: CommunicationOptions | None = None,
        subjects: Sequence[object] = (),
        report: Report | None = None,
    ) -> Nest:
        """Meet the other replicas; call `fn(strategy, gradients, shared)` once, for all of them.

        This is where the gradients of every optimizer are combined.

        Args:
          label: The name of the meeting in errors.
          fn: Gets the reduced gradients, and `shared`, as lists of `Mirrored`.
          gradients: The gradients of this replica.
          shared: Values that are the same on all replicas.
          reduction: By default, that of the strategy. A MEAN is weighted by the replicas' rows.
          options: How the gradients are communicated.
          subjects: The objects that the meeting is about.
          report: Called with the user's line if gradients that were reduced before are summed.
        """
        chosen = self._strategy.gradient_reduction if reduction is None else reduction
        usual = self._strategy.extended.communication_options
        merged = merge_options(options, None, usual)
        doubtful: Site | None = None
        if report is not None and chosen is GradientReduction.SUM and self._num_replicas > 1:
            if any(each is result() for result in self._reduced for each in gradients):
                report(users_line())
            else:
                watched = self._merger.watch(list(gradients), report)
                if watched is not None:
                    gradients = watched
                elif self._may_have_reduced(gradients):
                    doubtful = users_line()
        if chosen is GradientReduction.MEAN:
            weight = self._row_weight()
            gradients = [weighted(each, chosen, weight) for each in gradients]
        count = len(gradients)

        def reduce(strategy: StrategyLike, *values: PerReplica) -> Nest:
            if doubtful is not None and report is not None and are_equal(values[:count]):
                report(doubtful)
            reduced = combined(strategy, chosen, values[:count], merged)
            return fn(strategy, reduced, [value.agreed() for value in values[count:]])

        return self.merge(label, reduce, [*gradients, *shared], (*subjects, chosen))

    def reduce_gradients(
        self,
        gradients: Nest,
        *,
        reduction: GradientReduction | None = None,
        report: Report | None = None,
    ) -> Nest:
        """Combine a nest of gradients as `merge_gradients` does; all replicas get the result.

        Args:
          gradients: The gradients of this replica.
          reduction: By default, that of the strategy.
          report: As for `merge_gradients`.
        """
        leaves, structure = self._numeric_leaves(gradients, "reduce_gradients")
        if leaves:
            leaves = self.merge_gradients(
                "all_reduce of gradients",
                lambda _, reduced, __: reduced,
                leaves,
                reduction=reduction,
                subjects=(structure,),
                report=report,
            )
        return jax.tree.unflatten(structure, leaves)

    def _may_have_reduced(self, gradients: Sequence[Nest]) -> bool:
        """Tell whether `all_reduce` has returned something of the shape of each gradient.

        Scalars are no evidence: the loss is one as well.
        """
        shapes = {np.shape(each) for each in gradients} - {()}
        return bool(shapes) and shapes <= self._reduced_shapes

    @overload
    def all_gather(
        self,
        value: ArrayLike,
        axis: int,
        options: Hints = None,
        *,
        experimental_hints: Hints = None,
    ) -> jax.Array: ...
    @overload
    def all_gather(
        self,
        value: Values,
        axis: int,
        options: Hints = None,
        *,
        experimental_hints: Hints = None,
    ) -> Values: ...
    def all_gather(
        self,
        value: Nest,
        axis: int,
        options: Hints = None,
        *,
        experimental_hints: Hints = None,
    ) -> Nest:
        """Concatenate the replicas' arrays along `axis`; all replicas get the result.

        It is differentiable: each replica's gradient is its part of the sum of the replicas'
        gradients.
        """
        usual = self._strategy.extended.communication_options
        merged = merge_options(options, experimental_hints, usual)
        leaves, structure = self._numeric_leaves(value, "all_gather")

        def collective(arrays: list[jax.Array]) -> list[jax.Array]:
            def gather(strategy: StrategyLike, *values: PerReplica) -> list[Mirrored]:
                return [strategy.collectives.gather(value, axis, merged) for value in values]

            return self.merge(f"all_gather(axis={axis})", gather, arrays, (structure,))

        def own_part(arrays: list[jax.Array], cotangents: list[jax.Array]) -> list[jax.Array]:
            def scatter(strategy: StrategyLike, *values: PerReplica) -> list[PerReplica]:
                gathered, gradients = values[: len(arrays)], values[len(arrays) :]
                sums = strategy.collectives.reduce(ReduceOp.SUM, gradients, merged)
                agree_on_unknown_shapes(gathered)
                return [
                    _split_like(total, value, axis)
                    for total, value in zip(sums, gathered, strict=True)
                ]

            label = f"gradient of all_gather(axis={axis})"
            if _context.current().program is None:
                return self.merge(label, scatter, [*arrays, *cotangents])

            def equal_parts(strategy: StrategyLike, *values: PerReplica) -> list[PerReplica]:
                return strategy.collectives.reduce_scatter(ReduceOp.SUM, values, axis, merged)

            return self.merge(label, equal_parts, cotangents)  # in a program sizes are equal

        outputs = _differentiable(collective, own_part, leaves)
        return jax.tree.unflatten(structure, outputs)

    def aggregate(self, variable: Variable, value: jax.Array) -> jax.Array:
        """Combine the replicas' writes to `variable`, as its aggregation says."""
        aggregation = variable.aggregation

        def collective(arrays: list[jax.Array]) -> list[jax.Array]:
            def combine(strategy: StrategyLike, *values: PerReplica) -> list[Mirrored]:
                return [strategy.collectives.aggregate(aggregation, value) for value in values]

            label = f"a write to variable {variable.name!r}"
            return self.merge(label, combine, arrays, (variable,))

        # Writes to a variable are not differentiated, as with a gradient tape.
        def no_gradient(arrays: list[jax.Array], cotangents: list[jax.Array]) -> list[jax.Array]:
            return [jnp.zeros_like(array) for array in arrays]

        return _differentiable(collective, no_gradient, [value])[0]

    def merge(
        self,
        label: str,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        subjects: Sequence[object] = (),
    ) -> Nest:
        """Meet the other replicas; `fn` gets every leaf of `args` as a `PerReplica`.

        Errors call the meeting `label`; `subjects` are the objects that it is about.
        """
        return self._meet(
            Meeting(label, fn, (tuple(args), {}), always_wrap=True, subjects=tuple(subjects))
        )

    def once(self, label: str, make: Callable[[], Values]) -> Values:
        """Call `make` once for all replicas, in cross-replica context.

        The first replica makes the call and continues. The others find whatever it stores in the
        user's objects, such as a variable under a name.
        """
        self._require_running(label)
        return self._merger.once(self._local_index, label, make)

    def _meet(self, meeting: Meeting) -> Nest:
        self._require_running(meeting.label)
        if any(isinstance(leaf, PerReplica) for leaf in _nest.leaves(meeting.arguments)):
            meeting = replace(meeting, arguments=_nest.transform(_own, meeting.arguments))
        return self._merger.merge(self._local_index, meeting)

    def _require_running(self, label: str) -> None:
        frame = _context.current()
        here = frame.replica is self or (self._identity is None and frame.strategy is None)
        if frame.kind is not ContextKind.REPLICA or not here:
            raise ContextError(
                f"`{label}` was called on replica {self._replica_id} of "
                f"{self._strategy!r} outside of its replica context. Current context: {frame}. "
                "Call it in the function given to `strategy.run`; across replicas use "
                "`strategy.reduce` or `strategy.gather`."
            )

    def _numeric_leaves(
        self, value: Nest, method: str, op: ReduceOp | None = None
    ) -> tuple[list[jax.Array], object]:
        reduction = None if op is None else reduction_of(op)
        leaves, structure = _nest.flatten(value)
        leaves = [leaf.value if isinstance(leaf, Variable) else leaf for leaf in leaves]
        for leaf in leaves:
            if not isinstance(leaf, Tracer):
                require_numeric(leaf, method, reduction)
        return [jnp.asarray(leaf) for leaf in leaves], structure

    def __repr__(self) -> str:
        return f"<replica {self._replica_id} of {self._strategy!r}>"


def _own(leaf: object) -> Leaf:
    """Return this replica's component of a value that its function closes over."""
    own = leaf.own_component() if isinstance(leaf, PerReplica) else None
    return leaf if own is None else own


def _split_like(total: Mirrored, value: PerReplica, axis: int) -> PerReplica:
    """Return the parts of a sum that belong to the local replicas' components of `value`."""
    ends = np.cumsum([shape[axis] for shape in value.shapes])
    starts = [0, *ends[:-1]]
    topology = value.topology
    assert topology is not None
    return PerReplica(
        [
            jax.lax.slice_in_dim(copy, int(starts[replica]), int(ends[replica]), axis=axis)
            for copy, replica in zip(total.values, topology.local_replicas, strict=True)
        ],
        topology,
    )


def _differentiable(
    collective: Callable[[list[jax.Array]], list[jax.Array]],
    backward: Callable[[list[jax.Array], list[jax.Array]], list[jax.Array]],
    leaves: list[jax.Array],
) -> list[jax.Array]:
    """Call `collective(leaves)` with `backward(leaves, cotangents)` as its gradient rule.

    Concrete arrays go straight through. Under `jax.grad`, JAX calls the two rules with concrete
    arrays, one replica at a time, which is what makes collectives of threads differentiable.
    """
    if not any(isinstance(leaf, Tracer) for leaf in leaves):
        return collective(leaves)
    inexact = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    @jax.custom_vjp
    def call(leaves: list[jax.Array]) -> list[jax.Array]:
        return collective(leaves)

    def forward(leaves: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        # This is differentiable again, for derivatives of derivatives.
        return _differentiable(collective, backward, leaves), leaves

    def reverse(leaves: list[jax.Array], cotangents: list[jax.Array]) -> tuple[list[object]]:
        kept = [i for i, float_like in enumerate(inexact) if float_like]
        results = backward([leaves[i] for i in kept], [cotangents[i] for i in kept])
        found = dict(zip(kept, results, strict=True))
        return (
            [
                found[i] if i in found else np.zeros(leaf.shape, jax.dtypes.float0)
                for i, leaf in enumerate(leaves)
            ],
        )

    call.defvjp(forward, reverse)
    return call(leaves)
