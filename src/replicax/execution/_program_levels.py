"""A program while it is traced: `run` and variables at each of its two levels.

The outer level is cross-replica context, where values are global arrays. Each `run` in it is a
`shard_map` whose body is the inner level: one replica's code, where values are the replica's own.

A program with variables is traced twice. The first pass finds which variables each level touches;
reads give zeros, writes go nowhere, and neither derivatives nor updates are computed. In the second
pass the variables' states come in as arguments; those that are used in the bodies of `lax.cond`,
`lax.scan` and the like live in `jax.Ref`s, which carry writes along. If the first pass finds no
variables, it has traced the program itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, final

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, get_opaque_trace_state

from replicax import _bridges, _context, _nest
from replicax._context import ContextKind, Frame
from replicax._typing import Leaf, Nest, State, Values
from replicax.collectives import Collectives, InProgram
from replicax.errors import (
    ContextError,
    InconsistentTracing,
    MeetingInTrace,
)
from replicax.execution._call_site import CallSite, call_site
from replicax.execution._captures import Captures, Cells, Touched
from replicax.execution._executor import Executor
from replicax.execution._iterator_elements import TakesElementsInLoop
from replicax.execution._replica_context import Meeting, Merger, ReplicaContext
from replicax.execution._row_weights import row_weights
from replicax.execution._shard_map import TracedRun, joins_sums, on_replicas
from replicax.execution._shard_map_operands import (
    RunArguments,
    RunResults,
    is_number_like,
    python_numbers,
)
from replicax.execution._state_cells import Cell, RefCell
from replicax.execution._summed_twice import Report
from replicax.execution._variants import Variants, compute, result_shapes, trace
from replicax.topology import REPLICA_AXIS, Topology
from replicax.values import PerReplica, largest_of, select
from replicax.variables import Variable, all_or_nothing, set_state, state_of, storage_of

if TYPE_CHECKING:
    from replicax._typing import StrategyLike
    from replicax.input import DistributedIterator


# JAX's trace of a function that the user jits is valid for one `run` and one variant of it, which
# has its own refs and may reduce gradients in another way.
_cache_of_run = jax.make_user_context(None)


class _Level:
    """One level of a program in one pass; `Frame.program` holds it."""

    def __init__(
        self, captures: Captures, cells: Cells | None, found: Touched, inside: bool
    ) -> None:
        self.captures = captures
        self.cells = cells  # None in the first pass
        self._found = found  # what the first pass has found for this level
        self.touched = Touched()
        self.inside = inside
        self._layouts: dict[int, tuple[jax.Array, Any]] = {}  # the array keeps its id in use
        self._trace_state = get_opaque_trace_state()

    @property
    def is_first_pass(self) -> bool:
        return self.cells is None

    def state_of(self, variable: Variable) -> State:
        self.touch(Touched(read={variable: None}))
        if self.cells is None:
            shape = storage_of(variable).array_shape(self.inside, self.captures.topology)
            array = jnp.zeros(shape, variable.dtype)
        else:
            array = self._cell(variable).read()
        return storage_of(variable).wrap(array, self.captures.topology, self.inside)

    def set_state_of(self, variable: Variable, state: object) -> None:
        self.touch(Touched(written={variable: None}))
        if self.cells is not None:
            if variable not in self._found.written:
                raise _inconsistent(variable, "written")
            self._cell(variable).write(storage_of(variable).unwrap(state, self.captures.topology))

    def touch(self, touched: Touched) -> None:
        """Note that variables are read and written here."""
        self.touched.read.update(touched.read)
        self.touched.written.update(touched.written)
        # A derivative, which the first pass leaves out, is a JAX transformation as well.
        if self._is_nested() or _context.current().overlay is not None:
            self.touched.nested.update(dict.fromkeys(touched.all()))

    def skips_computing(self) -> bool:
        # A first pass that finds no variables traces the program itself.
        if not self.is_first_pass or self.captures.thorough or not self.touched:
            return False
        self.captures.skipped = True
        return True

    def note(self, topology: Topology) -> None:
        self.captures.noted = self.captures.noted or topology

    def note_layout(self, array: jax.Array, sharding: object) -> None:
        self._layouts[id(array)] = array, sharding

    def is_split(self, value: Any, topology: Topology) -> bool:
        _, sharding = self._layouts.get(id(value), (None, None))
        return sharding is not None and sharding.is_equivalent_to(topology.split, value.ndim)

    def next_element(self, iterator: DistributedIterator) -> Nest:
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

    def _is_nested(self) -> bool:
        """Tell whether the code runs in a JAX transformation that began inside this level."""
        return get_opaque_trace_state() != self._trace_state

    def _cell(self, variable: Variable) -> Cell | RefCell:
        assert self.cells is not None
        if variable not in self.cells:
            raise _inconsistent(variable, "used")
        cell = self.cells[variable]
        if isinstance(cell, Cell) and variable in self._found.written and self._is_nested():
            # JAX may reuse an earlier trace although the state has changed.
            raise _inconsistent(variable, "used in a transformation of JAX")
        return cell


def _inconsistent(variable: Variable, done: str) -> InconsistentTracing:
    return InconsistentTracing(
        f"Variable {variable.name!r} was not {done} when the function was traced first, but is "
        "now. A function must do the same whenever it is traced; look for Python state that it "
        "changes, or for a variable created under a condition."
    )


@final
class OuterLevel(_Level):
    """The cross-replica context of a program."""

    def __init__(
        self,
        captures: Captures,
        cells: Cells | None,
        elements: Sequence[Sequence[Nest]] = (),
    ) -> None:
        super().__init__(captures, cells, captures.outer, inside=False)
        self.runs_so_far = 0
        self._elements = elements  # the arrays of each, in the second pass
        self._taken_so_far = 0
        self._runs_before: dict[tuple[DistributedIterator, CallSite], int] = {}

    def next_element(self, iterator: DistributedIterator) -> Nest:
        if self._is_nested():
            raise ContextError(
                "`next` of a distributed iterator was called in the body of a JAX transformation, "
                "such as `lax.fori_loop`, which is traced once and would get one element for all "
                "of its rounds. Use a Python loop, or take the elements before it."
            )
        taken, number = self.captures.taken, self._taken_so_far
        self._taken_so_far += 1
        if not self.is_first_pass:
            return taken.again(iterator, number).rebuild(self._elements[number])
        # If the same calls reach a `next` again after a `run`, it is in a loop of steps, which
        # would be traced step by step. Without a `run` in between, the function only collects
        # elements, and stays one program.
        before = self._runs_before.setdefault((iterator, call_site(depth=1)), self.runs_so_far)
        if before < self.runs_so_far:
            raise TakesElementsInLoop
        element, arrays = taken.find(iterator)
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
        captures: Captures,
        cells: Cells | None,
        found: Touched,
        strategy: StrategyLike,
        frame: Frame,
        *,
        uneven: bool,
        row_weight: float,
    ) -> None:
        super().__init__(captures, cells, found, inside=True)
        self.row_weight = row_weight
        self._strategy = strategy
        self._collectives = InProgram(strategy.topology, uneven=uneven)
        self._cross_replica = replace(frame, program=self)
        self.handed_out: list[tuple[Nest, Callable[[Nest], None]]] = []

    def hand_out(self, value: Nest, receive: Callable[[Nest], None]) -> None:
        """Make the value an additional result of the `run`."""
        if self._is_nested():
            raise MeetingInTrace(
                "A replica's value was to leave a program from inside of a JAX transformation "
                "(such as `lax.scan`, or `rx.value_and_grad`), of which it is no result. Return it "
                "from the transformed function, and hand it out after that."
            )
        # In a function given to `merge_call`, some values are the same for all replicas.
        all_own = _context.current().kind is ContextKind.REPLICA
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
        return replace(frame, kind=ContextKind.REPLICA, replica=context, program=self)

    def merge(self, local_index: int, meeting: Meeting) -> Nest:
        """Call the function once, while tracing: all replicas are here by construction."""
        topology = self._strategy.topology

        def dress(leaf: object) -> Leaf:
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

    def watch(self, gradients: list[Any], report: Report) -> list[object] | None:
        return self.captures.watched.mark(gradients, report)

    def once(self, local_index: int, label: str, make: Callable[[], Values]) -> Values:
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
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        # The surrounding code has its own view of the same objects.
        with _bridges.suspended():
            return self._run(strategy, frame, fn, args, kwargs)

    def _run(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., object],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        level, topology = self._level, strategy.topology
        level.captures.use(strategy)
        inputs = RunArguments((tuple(args), dict(kwargs)), topology)
        variants = Variants.of(inputs.uneven_shapes, topology.num_replicas)
        level.captures.uneven |= len(variants) > 1
        weights = row_weights(inputs.shapes, topology.num_replicas)
        number = level.runs_so_far
        level.runs_so_far += 1
        touched = Touched() if level.is_first_pass else _captured(level.captures, number)
        variables, written = touched.all(), list(touched.written)
        given = python_numbers(inputs.leaves)
        outputs = [RunResults(given) for _ in variants.shapes]
        inner: list[_InnerLevel] = []

        def replica(variant: int, operands: list[jax.Array], states: list[jax.Array]) -> Any:
            """Run the code of a replica, on operands that have the shapes of its variant."""
            cells = None if level.is_first_pass else touched.cells(variables, states)
            inner_level = _InnerLevel(
                level.captures,
                cells,
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
            new_states = [cells[variable].last() for variable in written if cells is not None]
            return arrays, new_states

        def body(operands: list[jax.Array], blocks: list[jax.Array]) -> Any:
            states = [
                storage_of(variable).own_of(block, topology)
                for variable, block in zip(variables, blocks, strict=True)
            ]
            if len(variants) == 1:
                # `jit` turns the code into one equation, so that later steps, which apply and
                # compile the program, trace one equation and not thousands.
                code = functools.partial(replica, 0)
                arrays, new_states = (code if joins_sums(topology) else jax.jit(code))(
                    operands, states
                )
            else:
                arrays, new_states = _in_variants(
                    variants, outputs, replica, operands, states, blank
                )
            if level.is_first_pass:
                return arrays, new_states
            return arrays, [
                storage_of(variable).block_of(state, topology)
                for variable, state in zip(written, new_states, strict=True)
            ]

        def blank() -> bool:
            """Tell whether this pass only finds variables, and needs nothing but shapes."""
            return level.is_first_pass and any(each.touched for each in inner)

        states = [storage_of(each).unwrap(state_of(each), topology) for each in variables]
        state_specs = [storage_of(variable).spec(topology) for variable in variables]
        new_specs = [storage_of(variable).spec(topology) for variable in written]
        call = (body, topology, (inputs.specs, state_specs), new_specs, inputs.operands, states)
        common: list[bool] = []
        sums: dict[int, jax.Array] = {}
        try:
            if _may_have_common_results(topology):
                traced = TracedRun(*call)
                if blank():
                    arrays, new_states = traced.blank()
                else:
                    arrays, new_states, common, sums = traced.apply()
            else:
                arrays, new_states = on_replicas(*call)
        finally:
            if level.is_first_pass and inner:  # even if it failed, as the user may continue
                level.captures.runs[number] = Touched.union([each.touched for each in inner])
                level.touch(Touched(read=dict.fromkeys(level.captures.runs[number].all())))
        if level.is_first_pass:
            level.touch(Touched(written=level.captures.runs[number].written))
        for variable, array in zip(written, new_states, strict=True):
            set_state(variable, storage_of(variable).wrap(array, topology, inside=False))
        result, handed_out = outputs[0].rebuild(arrays, topology, common, sums)
        with _context.entered(frame):
            for value, (_, receive) in zip(handed_out, inner[-1].handed_out, strict=True):
                receive(value)
        return result


def _in_variants(
    variants: Variants,
    outputs: Sequence[RunResults],
    replica: Callable[[int, list[jax.Array], list[jax.Array]], Any],
    operands: list[jax.Array],
    states: list[jax.Array],
    blank: Callable[[], bool],
) -> Nest:
    """Run the code of a replica where shapes differ between replicas; see `_variants.py`."""
    count = len(operands)

    def traced(variant: int) -> ClosedJaxpr:
        def function(arguments: list[jax.Array]) -> list[jax.Array]:
            arrays, new_states = replica(variant, arguments[:count], arguments[count:])
            return [*arrays, *new_states]

        return trace(function, [*operands, *states])

    jaxprs = [traced(variant) for variant in range(len(variants))]
    ends = outputs[0].require_alike(outputs[1:])
    shapes, dtypes = result_shapes(jaxprs, may_differ=ends)
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
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        topology = strategy.topology
        with (
            all_or_nothing(frame) as frame,
            _context.entered(self._level.replica_frame(frame)),
        ):
            here_args = select(tuple(args), 0, topology, keep_opaque=True)
            here_kwargs = select(dict(kwargs), 0, topology, keep_opaque=True)
            result = _bridges.surrounded(fn)(*here_args, **here_kwargs)
        return _nest.transform(
            lambda leaf: (
                PerReplica.from_array(jnp.asarray(leaf), topology, inside=True)
                if is_number_like(leaf)
                else leaf
            ),
            result,
            keep_opaque=True,
        )


def _may_have_common_results(topology: Topology) -> bool:
    """Tell whether to look for common results; logical devices keep their parts of each result."""
    return topology.num_replicas > 1 and topology.logical_devices_per_replica == 1


def _first(value: object) -> object:
    return value.primary if isinstance(value, PerReplica) else value


def _captured(captures: Captures, number: int) -> Touched:
    if number not in captures.runs:
        raise InconsistentTracing(
            f"The function called `run` {len(captures.runs)} time(s) when it was traced first, and "
            "more often now. A function must do the same whenever it is traced; look for Python "
            "state that it changes."
        )
    return captures.runs[number]
