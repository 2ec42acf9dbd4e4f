"""A program while it is traced: what `run` and variables mean at each of its two levels.

The outer level is cross-replica context, where values are global arrays. Each `run` in it is a
`shard_map` whose body is the inner level: one replica's code, where values are the replica's own.

A program with variables is traced twice. The first pass finds which variables each level touches;
reads give zeros, writes go nowhere, and derivatives are not taken. In the second pass their states
come in as arguments and live in `jax.Ref`s, so that `lax.cond`, `lax.scan` and the like carry
writes in their bodies along. If the first pass finds no variables, it has traced the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, final

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, get_opaque_trace_state
from jax.sharding import PartitionSpec

from replicax import _bridges, _context, _nest
from replicax._context import Frame, Kind
from replicax._typing import Nest
from replicax.collectives import Collectives, InProgram
from replicax.errors import (
    ContextError,
    InconsistentTracing,
    MeetingInTrace,
)
from replicax.execution._executor import Executor
from replicax.execution._operands import (
    SAME,
    SPLIT,
    Inputs,
    Outputs,
    is_number_like,
    python_numbers,
)
from replicax.execution._place import Place, place
from replicax.execution._plan import Plan, Touched
from replicax.execution._pulling import TakesElementsInLoop
from replicax.execution._replica_context import Meeting, Merger, ReplicaContext
from replicax.execution._rows import row_weights
from replicax.execution._sharding import TracedRun, on_replicas
from replicax.execution._summed_twice import Report
from replicax.execution._variants import Variants, compute, merged_shapes, trace
from replicax.topology import REPLICA_AXIS, Topology
from replicax.values import PerReplica, largest_of, select
from replicax.variables import Variable, all_or_nothing

if TYPE_CHECKING:
    from replicax._typing import StrategyLike
    from replicax.input import DistributedIterator


# What JAX has traced of a function that the user jits holds for one `run` and one variant of it,
# which has its own refs, and may reduce gradients in another way.
_cache_of_run = jax.make_user_context(None)


class _Level:
    """One level of a program in one pass; what `Frame.program` holds."""

    def __init__(
        self, plan: Plan, refs: dict[Variable, Any] | None, found: Touched, inside: bool
    ) -> None:
        self.plan = plan
        self.refs = refs  # None in the first pass
        self._found = found  # what the first pass has found for this level
        self.touched = Touched()
        self.inside = inside
        self._layouts: dict[int, tuple[jax.Array, Any]] = {}  # with the array, which keeps its id

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
            ref = self._ref(variable)
            if variable not in self._found.written:
                raise _inconsistent(variable, "written")
            ref[...] = variable.unwrap_state(state, self.plan.topology)

    def skips_derivatives(self) -> bool:
        if not self.finding or self.plan.thorough:
            return False
        self.plan.skipped = True
        return True

    def note(self, topology: Topology) -> None:
        self.plan.noted = self.plan.noted or topology

    def note_layout(self, array: jax.Array, sharding: Any) -> None:
        self._layouts[id(array)] = array, sharding

    def is_split(self, value: Any, topology: Topology) -> bool:
        _, sharding = self._layouts.get(id(value), (None, None))
        return sharding is not None and sharding.is_equivalent_to(topology.split, value.ndim)

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
            raise _inconsistent(variable, "used")
        return self.refs[variable]


def _inconsistent(variable: Variable, done: str) -> InconsistentTracing:
    return InconsistentTracing(
        f"Variable {variable.name!r} was not {done} when the function was traced first, but is "
        "now. A function has to do the same whenever it is traced; look for Python state that it "
        "changes, or for a variable created under a condition."
    )


@final
class OuterLevel(_Level):
    """Cross-replica context of a program."""

    def __init__(
        self,
        plan: Plan,
        refs: dict[Variable, Any] | None,
        elements: Sequence[Sequence[Any]] = (),
    ) -> None:
        super().__init__(plan, refs, plan.outer, inside=False)
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
        self,
        plan: Plan,
        refs: dict[Variable, Any] | None,
        found: Touched,
        strategy: StrategyLike,
        frame: Frame,
        *,
        uneven: bool,
        row_weight: float,
    ) -> None:
        super().__init__(plan, refs, found, inside=True)
        self.row_weight = row_weight
        self._strategy = strategy
        self._collectives = InProgram(strategy.topology, uneven=uneven)
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
            row_weight=lambda: self.row_weight,
        )
        return replace(frame, kind=Kind.REPLICA, replica=context, program=self)

    def merge(self, local_index: int, meeting: Meeting) -> Nest:
        """All replicas are here by construction: the function is called once, while tracing."""
        topology = self._strategy.topology

        def dress(leaf: Any) -> Any:
            if topology.num_replicas == 1 and not meeting.always_wrap:
                return leaf
            if isinstance(leaf, Tracer) or (meeting.always_wrap and is_number_like(leaf)):
                return PerReplica.from_array(jnp.asarray(leaf), topology, inside=True)
            return leaf

        args, kwargs = _nest.transform(dress, meeting.arguments)
        transaction = _context.current().transaction
        with _context.entered(replace(self._cross_replica, transaction=transaction)):
            result = meeting.fn(self._strategy, *args, **kwargs)
        return select(result, 0, topology)

    def watch(self, gradients: list[Any], report: Report) -> list[Any] | None:
        return self.plan.watched.mark(gradients, report)

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
        inputs = Inputs((tuple(args), dict(kwargs)), topology)
        variants = Variants.of(inputs.uneven_shapes, topology.num_replicas)
        level.plan.uneven |= len(variants) > 1
        weights = row_weights(inputs.shapes, topology.num_replicas)
        number = level.runs_so_far
        level.runs_so_far += 1
        touched = Touched() if level.finding else _planned(level.plan, number)
        variables, written = touched.all(), list(touched.written)
        given = python_numbers(inputs.leaves)
        outputs = [Outputs(given) for _ in variants.shapes]
        inner: list[_InnerLevel] = []

        def replica(variant: int, operands: list[jax.Array], states: list[jax.Array]) -> Any:
            """The code of a replica, on operands that have the shapes of its variant."""
            refs = (
                None
                if level.finding
                else {
                    variable: jax.new_ref(_local(variable, state))
                    for variable, state in zip(variables, states, strict=True)
                }
            )
            inner_level = _InnerLevel(
                level.plan,
                refs,
                touched,
                strategy,
                frame,
                uneven=len(variants) > 1,
                row_weight=weights[variants.of_replica.index(variant)],
            )
            inner.append(inner_level)
            with _context.entered(inner_level.replica_frame(frame)), _cache_of_run(object()):
                body_args, body_kwargs = inputs.rebuild(operands, variants.shapes[variant])
                result = _bridges.surrounded(fn)(*body_args, **body_kwargs)
                handed_out = [value for value, _ in inner_level.handed_out]
                arrays = outputs[variant].take((result, handed_out))
            new_states = [
                _row(variable, refs[variable][...]) for variable in written if refs is not None
            ]
            return arrays, new_states

        def body(operands: list[jax.Array], states: list[jax.Array]) -> Any:
            if len(variants) == 1:
                return replica(0, operands, states)
            return _in_variants(variants, outputs, replica, operands, states, blank)

        def blank() -> bool:
            """Tell whether the pass only finds variables, and wants no more than shapes."""
            return level.finding and any(each.touched for each in inner)

        states = [variable.unwrap_state(variable.state, topology) for variable in variables]
        state_specs = [_spec(variable) for variable in variables]
        new_specs = [_spec(variable) for variable in written]
        call = (body, topology, (inputs.specs, state_specs), new_specs, inputs.operands, states)
        common: list[bool] = []
        try:
            if _may_have_common_results(topology):
                traced = TracedRun(*call)
                if blank():
                    arrays, new_states = traced.blank()
                else:
                    arrays, new_states, common = traced.apply()
            else:
                arrays, new_states = on_replicas(*call)
        finally:
            if level.finding and inner:  # also if it failed, should the user go on
                level.plan.runs[number] = Touched.union([each.touched for each in inner])
                level.touched.read.update(dict.fromkeys(level.plan.runs[number].all()))
        if level.finding:
            level.touched.written.update(level.plan.runs[number].written)
        for variable, array in zip(written, new_states, strict=True):
            variable.set_state(variable.wrap_state(array, topology, inside=False))
        result, handed_out = outputs[0].rebuild(arrays, topology, common)
        with _context.entered(frame):
            for value, (_, receive) in zip(handed_out, inner[-1].handed_out, strict=True):
                receive(value)
        return result


def _in_variants(
    variants: Variants,
    outputs: Sequence[Outputs],
    replica: Callable[[int, list[jax.Array], list[jax.Array]], Any],
    operands: list[jax.Array],
    states: list[jax.Array],
    blank: Callable[[], bool],
) -> Any:
    """The code of a replica whose shapes others do not share; see `_variants.py`."""
    count = len(operands)

    def traced(variant: int) -> ClosedJaxpr:
        def function(arguments: list[jax.Array]) -> list[jax.Array]:
            arrays, new_states = replica(variant, arguments[:count], arguments[count:])
            return [*arrays, *new_states]

        return trace(function, [*operands, *states])

    jaxprs = [traced(variant) for variant in range(len(variants))]
    ends = outputs[0].require_alike(outputs[1:])
    shapes, dtypes = merged_shapes(jaxprs, may_differ=ends)
    outputs[0].note_shapes([variants.of_replicas(each) for each in shapes[:ends]])
    if blank():
        results = [
            jnp.empty(largest_of(each), dtype) for each, dtype in zip(shapes, dtypes, strict=True)
        ]
    else:
        results = compute(variants, jaxprs, [*operands, *states])
    return results[:ends], results[ends:]


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
                if is_number_like(leaf)
                else leaf
            ),
            result,
            handed=True,
        )


def _may_have_common_results(topology: Topology) -> bool:
    """Tell whether it is worth knowing; logical devices keep their parts of each result."""
    return topology.num_replicas > 1 and topology.logical_devices_per_replica == 1


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


def _spec(variable: Variable) -> PartitionSpec:
    return SPLIT if variable.split_over_replicas else SAME


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
