"""A program while it is traced: what `run` and variables mean at each of its two levels.

The outer level is cross-replica context, where values are global arrays. Each `run` in it is a
`shard_map` whose body is the inner level: one replica's code, where values are the replica's own.

A program is traced twice. The first pass finds which variables each level touches; reads give
zeros and writes go nowhere. In the second pass their states come in as arguments and live in
`jax.Ref`s, so that `lax.cond`, `lax.scan` and the like carry writes in their bodies along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state
from jax.sharding import PartitionSpec

from replicax import _bridges, _context, _nest
from replicax._context import Frame, Kind
from replicax._typing import Nest
from replicax.collectives import Collectives, InProgram
from replicax.errors import (
    ContextError,
    InconsistentTracing,
    InvalidArgument,
    MeetingInTrace,
)
from replicax.execution._executor import Executor
from replicax.execution._place import Place, place
from replicax.execution._pulling import NotOneProgram, Pulls, TakesElementsInLoop
from replicax.execution._replica_context import Meeting, Merger, ReplicaContext
from replicax.topology import REPLICA_AXIS, Topology
from replicax.values import Mirrored, PerReplica, select
from replicax.variables import Variable, all_or_nothing

if TYPE_CHECKING:
    from replicax._typing import StrategyLike
    from replicax.input import DistributedIterator

_SPLIT, _SAME = PartitionSpec(REPLICA_AXIS), PartitionSpec()


@dataclass
class Touched:
    """The variables that a level of a program reads, and those that it writes."""

    read: dict[Variable, None] = field(default_factory=dict)  # sets that keep the order
    written: dict[Variable, None] = field(default_factory=dict)

    def all(self) -> list[Variable]:
        return list({**self.read, **self.written})


@dataclass
class Plan:
    """What the first pass has found."""

    outer: Touched = field(default_factory=Touched)
    runs: dict[int, Touched] = field(default_factory=dict)
    pulls: Pulls = field(default_factory=Pulls)
    topology: Topology | None = None
    noted: Topology | None = None  # over which values are combined, should nothing be run

    def use(self, strategy: StrategyLike) -> None:
        if self.topology is None:
            self.topology = strategy.topology
        elif self.topology != strategy.topology:
            raise InvalidArgument(
                f"One `rx.function` runs on {self.topology} and, by {strategy!r}, on "
                f"{strategy.topology}. Use one strategy in a function."
            )


class _Level:
    """One level of a program in one pass; what `Frame.program` holds."""

    def __init__(self, plan: Plan, refs: dict[Variable, Any] | None, inside: bool) -> None:
        self.plan = plan
        self.refs = refs  # None in the first pass
        self.touched = Touched()
        self.inside = inside

    @property
    def finding(self) -> bool:
        return self.refs is None

    def state_of(self, variable: Variable) -> Any:
        self.touched.read[variable] = None
        if self.refs is None:
            array = jnp.zeros(_array_shape(variable, self.inside), variable.dtype)
        else:
            array = self._ref(variable)[...]
        return variable.wrap_state(array, self.plan.topology, self.inside)

    def set_state_of(self, variable: Variable, state: Any) -> None:
        self.touched.written[variable] = None
        if self.refs is not None:
            self._ref(variable)[...] = variable.unwrap_state(state, self.plan.topology)

    def note(self, topology: Topology) -> None:
        self.plan.noted = self.plan.noted or topology

    def pull(self, iterator: DistributedIterator) -> Nest:
        raise ContextError(
            "`next` of a distributed iterator was called in a function given to `merge_call`, "
            "where a program cannot wait for input. Take the element outside of `run`, and pass it "
            "on."
        )

    def hand_out(self, value: Nest, receive: Callable[[Nest], None]) -> None:
        receive(value)

    def loop(self) -> NoReturn:
        raise ContextError(
            "A distributed dataset was iterated over in a function given to `run` or "
            "`merge_call`. Have the loop outside, and give its elements to `run`."
        )

    def _ref(self, variable: Variable) -> Any:
        assert self.refs is not None
        if variable not in self.refs:
            raise InconsistentTracing(
                f"Variable {variable.name!r} was not used when the function was traced first, but "
                "is now. A function has to do the same whenever it is traced; look for Python "
                "state that it changes, or for a variable created under a condition."
            )
        return self.refs[variable]


@final
class OuterLevel(_Level):
    """Cross-replica context of a program."""

    def __init__(
        self,
        plan: Plan,
        refs: dict[Variable, Any] | None,
        elements: Sequence[Sequence[Any]] = (),
    ) -> None:
        super().__init__(plan, refs, inside=False)
        self.runs_so_far = 0
        self._elements = elements  # the arrays of each, in the second pass
        self._pulls_so_far = 0
        self._runs_before: dict[tuple[DistributedIterator, Place], int] = {}
        self._trace_state = get_opaque_trace_state()

    def pull(self, iterator: DistributedIterator) -> Nest:
        if get_opaque_trace_state() != self._trace_state:
            raise ContextError(
                "`next` of a distributed iterator was called in the body of a JAX transformation, "
                "such as `lax.fori_loop`, which is traced once and would get one element for all "
                "of its rounds. Use a Python loop, or take the elements before it."
            )
        pulls, number = self.plan.pulls, self._pulls_so_far
        self._pulls_so_far += 1
        if not self.finding:
            return pulls.again(iterator, number).rebuild(self._elements[number])
        # A `next` that is reached again, by the same calls, after a `run` is in a loop of steps,
        # which would be traced step by step. Without a `run` in between the function only
        # collects elements, and stays one program.
        before = self._runs_before.setdefault((iterator, place(depth=1)), self.runs_so_far)
        if before < self.runs_so_far:
            raise TakesElementsInLoop
        element, arrays = pulls.find(iterator)
        return element.rebuild([jnp.zeros(array.shape, array.dtype) for array in arrays])

    def loop(self) -> NoReturn:
        raise TakesElementsInLoop

    @property
    def collectives(self) -> Collectives | None:
        return None

    @property
    def executor(self) -> Executor:
        return _ShardedExecutor(self)


@final
class _InnerLevel(_Level, Merger):
    """The code of one replica in a program."""

    def __init__(
        self, plan: Plan, refs: dict[Variable, Any] | None, strategy: StrategyLike, frame: Frame
    ) -> None:
        super().__init__(plan, refs, inside=True)
        self._strategy = strategy
        self._collectives = InProgram(strategy.topology)
        self._cross_replica = replace(frame, program=self)
        self.handed_out: list[tuple[Nest, Callable[[Nest], None]]] = []
        self._trace_state = get_opaque_trace_state()

    def hand_out(self, value: Nest, receive: Callable[[Nest], None]) -> None:
        """The value becomes one more result of the `run`."""
        if get_opaque_trace_state() != self._trace_state:
            raise MeetingInTrace(
                "A replica's value was to leave a program from inside of a JAX transformation "
                "(such as `lax.scan`, or `rx.value_and_grad`), of which it is no result. Return it "
                "from the transformed function, and hand it out after that."
            )
        # In a function given to `merge_call`, some values are the same for all replicas.
        all_own = _context.current().kind is Kind.REPLICA
        own = _nest.transform(lambda leaf: all_own or isinstance(leaf, PerReplica), value)

        def received(outside: Nest) -> None:
            receive(_nest.transform(lambda x, mine: x if mine else _first(x), outside, own))

        self.handed_out.append((select(value, 0, self._strategy.topology), received))

    @property
    def collectives(self) -> Collectives | None:
        return self._collectives

    @property
    def executor(self) -> Executor:
        return _InnerExecutor(self)

    def replica_frame(self, frame: Frame) -> Frame:
        topology = self._strategy.topology
        context = ReplicaContext(
            self._strategy,
            self,
            jax.lax.axis_index(REPLICA_AXIS),
            0,
            topology.num_replicas,
            topology.devices[topology.local_replicas[0]],
        )
        return replace(frame, kind=Kind.REPLICA, replica=context, program=self)

    def merge(self, local_index: int, meeting: Meeting) -> Nest:
        """All replicas are here by construction: the function is called once, while tracing."""
        topology = self._strategy.topology

        def dress(leaf: Any) -> Any:
            if topology.num_replicas == 1 and not meeting.always_wrap:
                return leaf
            if isinstance(leaf, Tracer) or (meeting.always_wrap and _is_numeric(leaf)):
                return PerReplica.from_array(jnp.asarray(leaf), topology, inside=True)
            return leaf

        args, kwargs = _nest.transform(dress, meeting.arguments)
        transaction = _context.current().transaction
        with _context.entered(replace(self._cross_replica, transaction=transaction)):
            result = meeting.fn(self._strategy, *args, **kwargs)
        return select(result, 0, topology)

    def once(self, local_index: int, label: str, make: Callable[[], Any]) -> Any:
        transaction = _context.current().transaction
        with _context.entered(replace(self._cross_replica, transaction=transaction)):
            return make()


@final
class _ShardedExecutor(Executor):
    """`run` at the outer level: a `shard_map`."""

    def __init__(self, level: OuterLevel) -> None:
        self._level = level

    def run(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., Any],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        # The code around it has its own view of the same objects.
        with _bridges.away():
            return self._run(strategy, frame, fn, args, kwargs)

    def _run(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., Any],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        level, topology = self._level, strategy.topology
        level.plan.use(strategy)
        inputs = _Inputs((tuple(args), dict(kwargs)), topology)
        number = level.runs_so_far
        level.runs_so_far += 1
        touched = Touched() if level.finding else _planned(level.plan, number)
        variables, written = touched.all(), list(touched.written)
        outputs = _Outputs()
        inner: list[_InnerLevel] = []

        def body(operands: list[jax.Array], states: list[jax.Array]) -> Any:
            refs = (
                None
                if level.finding
                else {
                    variable: jax.new_ref(_local(variable, state))
                    for variable, state in zip(variables, states, strict=True)
                }
            )
            inner_level = _InnerLevel(level.plan, refs, strategy, frame)
            inner.append(inner_level)
            with _context.entered(inner_level.replica_frame(frame)):
                body_args, body_kwargs = inputs.rebuild(operands)
                result = _bridges.surrounded(fn)(*body_args, **body_kwargs)
                arrays = outputs.take((result, [value for value, _ in inner_level.handed_out]))
            new_states = [
                _row(variable, refs[variable][...]) for variable in written if refs is not None
            ]
            return arrays, new_states

        states = [variable.unwrap_state(variable.state, topology) for variable in variables]
        state_specs = [_spec(variable) for variable in variables]
        new_specs = [_spec(variable) for variable in written]
        mapped = jax.shard_map(
            body,
            mesh=topology.mesh,
            axis_names={REPLICA_AXIS},  # XLA divides the work over the logical devices
            in_specs=(inputs.specs, state_specs),
            out_specs=(_SPLIT, new_specs),
            check_vma=False,  # gradients are local; collectives have rules of their own
        )
        try:
            arrays, new_states = mapped(inputs.operands, states)
        finally:
            if level.finding and inner:  # also if it failed, should the user go on
                level.plan.runs[number] = inner[-1].touched
                level.touched.read.update(dict.fromkeys(inner[-1].touched.all()))
        if level.finding:
            level.touched.written.update(level.plan.runs[number].written)
        for variable, array in zip(written, new_states, strict=True):
            variable.set_state(variable.wrap_state(array, topology, inside=False))
        result, handed_out = outputs.rebuild(arrays, topology)
        with _context.entered(frame):
            for value, (_, receive) in zip(handed_out, inner[-1].handed_out, strict=True):
                receive(value)
        return result


@final
class _InnerExecutor(Executor):
    """`run` in a function given to `merge_call`: every replica is here already."""

    def __init__(self, level: _InnerLevel) -> None:
        self._level = level

    def run(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., Any],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        topology = strategy.topology
        with (
            all_or_nothing(frame) as frame,
            _context.entered(self._level.replica_frame(frame)),
        ):
            here_args = select(tuple(args), 0, topology, handed=True)
            here_kwargs = select(dict(kwargs), 0, topology, handed=True)
            result = _bridges.surrounded(fn)(*here_args, **here_kwargs)
        return _nest.transform(
            lambda leaf: (
                PerReplica.from_array(jnp.asarray(leaf), topology, inside=True)
                if _is_numeric(leaf)
                else leaf
            ),
            result,
            handed=True,
        )


class _Inputs:
    """The arguments of a `run`, as operands of a `shard_map` and what is left of them."""

    def __init__(self, nest: Nest, topology: Topology) -> None:
        leaves, self._structure = _nest.flatten(nest, handed=True)
        self.operands: list[Any] = []
        self.specs: list[PartitionSpec] = []
        self._fill: list[Callable[[Any], Any]] = []
        self._leaves = leaves
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, PerReplica):
                if not leaf.uniform:
                    raise NotOneProgram
                if not all(_is_numeric(sample) for sample in leaf.samples()):
                    raise NotOneProgram
                self._add(index, leaf.array(topology), _SPLIT, leaf.scalars)
            elif isinstance(leaf, Mirrored):
                self._add(index, leaf.array(topology), _SAME, False)
            elif isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
                self._add(index, jnp.asarray(leaf), _SAME, False)

    def _add(self, index: int, operand: Any, spec: PartitionSpec, scalar: bool) -> None:
        self.operands.append(operand)
        self.specs.append(spec)
        self._fill.append(lambda local: (index, local[0] if scalar else local))

    def rebuild(self, operands: list[Any]) -> Nest:
        leaves = list(self._leaves)
        for fill, operand in zip(self._fill, operands, strict=True):
            index, local = fill(operand)
            leaves[index] = local
        return jax.tree.unflatten(self._structure, leaves)


class _Outputs:
    """What a `run` returns: arrays of the `shard_map`, and what is not an array."""

    def take(self, nest: Nest) -> list[jax.Array]:
        """Inside: the arrays, with a first dimension to put them one after another by."""
        leaves, self._structure = _nest.flatten(nest, handed=True)
        self._numeric = [_is_numeric(leaf) for leaf in leaves]
        arrays = [jnp.asarray(leaf) for leaf in leaves if _is_numeric(leaf)]
        self._scalars = [array.ndim == 0 for array in arrays]
        self._plain = [None if _is_numeric(leaf) else leaf for leaf in leaves]
        return [
            array[None] if scalar else array
            for array, scalar in zip(arrays, self._scalars, strict=True)
        ]

    def rebuild(self, arrays: list[jax.Array], topology: Topology) -> Nest:
        """Outside: the nest, with per-replica values."""
        values = iter(
            [
                (array[0] if scalar else array)
                if topology.num_replicas == 1
                else PerReplica.from_array(array, topology, scalars=scalar)
                for array, scalar in zip(arrays, self._scalars, strict=True)
            ]
        )
        leaves = [
            next(values) if numeric else leaf
            for numeric, leaf in zip(self._numeric, self._plain, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)


def _first(value: Any) -> Any:
    return value.primary if isinstance(value, PerReplica) else value


def _planned(plan: Plan, number: int) -> Touched:
    if number not in plan.runs:
        raise InconsistentTracing(
            f"The function called `run` {len(plan.runs)} time(s) when it was traced first, and "
            "more often now. A function has to do the same whenever it is traced; look for Python "
            "state that it changes."
        )
    return plan.runs[number]


def _is_numeric(leaf: Any) -> bool:
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        return True
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _spec(variable: Variable) -> PartitionSpec:
    return _SPLIT if variable.split_over_replicas else _SAME


def _local(variable: Variable, state: jax.Array) -> jax.Array:
    """A state as the body of a `shard_map` gets it, as the replica's own."""
    return state[0] if variable.split_over_replicas and not variable.shape else state


def _row(variable: Variable, state: jax.Array) -> jax.Array:
    """The reverse of `_local`."""
    return state[None] if variable.split_over_replicas and not variable.shape else state


def _array_shape(variable: Variable, inside: bool) -> tuple[int, ...]:
    if inside or not variable.split_over_replicas or variable.strategy is None:
        return variable.shape
    replicas = variable.strategy.topology.num_replicas
    if not variable.shape:
        return (replicas,)
    return (replicas * variable.shape[0], *variable.shape[1:])
