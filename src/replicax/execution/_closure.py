"""Functions that a coordinator schedules, as programs that workers can run without their code.

A closure is traced like any compiled function. The outcome is an export of its program, the
variables whose values it needs, the elements it takes, and what it changes: the program computes
operands, and the servers of the variables apply the changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from jax.extend.core import ClosedJaxpr, get_opaque_trace_state, jaxpr_as_fun

from replicax import _bridges, _context, _nest
from replicax._context import ContextKind, Frame
from replicax._jax_compat import calls_python, needed_inputs, without_mesh
from replicax._typing import Nest, StrategyLike
from replicax.errors import ContextError, InvalidArgument, InvalidType
from replicax.execution._cache_key import Signature, signature_of
from replicax.execution._compiled_program import ProgramResults
from replicax.execution._function import Function
from replicax.execution._input_signature import conformed
from replicax.execution._iterator_elements import NotOneProgram, TakenElements
from replicax.execution._shard_map_operands import python_numbers
from replicax.execution._tracing import TracedProgram, trace_program
from replicax.variables import OnServers, ServerUpdate, Variable, Write, storage_of

Peek = Callable[[int, int], list[Nest]]


@final
@dataclass(frozen=True, slots=True)
class IteratorArgument:
    """The stand-in, while a closure is traced, for an iterator that each worker has its own of.

    Args:
      place: Its number among the iterators in the arguments.
    """

    place: int

    def __next__(self) -> Nest:
        program = _context.current().program
        assert program is not None
        return program.next_element(self)  # pyright: ignore[reportArgumentType]  see `_peek`

    def _peek(self, count: int) -> list[Nest]:
        """Return examples of elements, as `DistributedIterator._peek` returns elements."""
        closure = _context.current().closure
        assert closure is not None
        return closure.peek(self.place, count)


@final
class _Lookup:
    """Rows of a variable, which a worker fetches before it runs the program.

    To the program they are an element that it takes, of an iterator that has only one.
    """

    def __init__(self, variable: Variable, shape: tuple[int, ...]) -> None:
        self.variable, self.shape = variable, shape

    def _peek(self, count: int) -> list[np.ndarray]:
        return [np.broadcast_to(np.zeros((), self.variable.dtype), self.shape)]


@final
class ClosureCall:
    """The signature of a call of a function, and the arrays in its arguments."""

    def __init__(
        self, strategy: StrategyLike, function: Function, signature: Signature, arrays: list[Any]
    ) -> None:
        self.signature, self.arrays = signature, arrays
        self._frame = Frame(strategy, ContextKind.CROSS_REPLICA)
        self._bound = signature.bind(function.python_function)
        self._given = python_numbers(signature.leaves)

    @classmethod
    @without_mesh
    def of(
        cls,
        strategy: StrategyLike,
        function: Function,
        args: tuple[Nest, ...],
        kwargs: Mapping[str, Nest],
    ) -> ClosureCall:
        """Return the call of a function in the scope of a strategy."""
        if function.input_signature is not None:
            args = conformed(function.__name__, function.input_signature, args, kwargs)
        _bridges.load()
        frame = Frame(strategy, ContextKind.CROSS_REPLICA)
        with _context.entered(frame):
            signature, arrays = signature_of(
                None, frame, function.python_function, args, dict(kwargs), {}
            )
        if signature is None:
            raise InvalidType(
                f"`{function.__name__}` was scheduled with an argument that a program cannot take, "
                "such as an array of strings. Pass arrays of numbers."
            )
        return cls(strategy, function, signature, arrays)

    @without_mesh
    def trace(self, name: str, peek: Peek, platforms: Sequence[str]) -> TracedClosure:
        """Return the program for this call, given examples of the elements that it takes."""
        trace, taken = _Trace(peek), TakenElements()
        outputs = ProgramResults(self._given)

        def function(arrays: list[Any]) -> list[jax.Array]:
            *arrays, index = arrays
            trace.begin(index)
            result = _nest.transform(
                lambda leaf: leaf.value if isinstance(leaf, Variable) else leaf,
                self._bound(arrays),
            )
            results = outputs.take(result)
            trace.count = len(results)
            return [*results, *trace.operands(), *trace.rows]

        arrays = [*self.arrays, np.int32(0)]
        try:
            frame = replace(self._frame, closure=trace)
            with _context.entered(frame):
                traced = trace_program(function, frame, arrays, taken)
        except NotOneProgram:
            raise InvalidType(
                f"`{name}` cannot be a program for a worker: an element that it takes has strings "
                "or objects in it. Have the dataset give arrays of numbers."
            ) from None
        _require_servers(name, traced)
        return TracedClosure.of(name, traced, trace, taken, outputs, len(arrays), platforms)


@final
@dataclass(frozen=True, slots=True)
class ClosureWrite:
    """A write of a closure to a variable; with `to_rows`, an addition to some of its rows."""

    variable: Variable
    write: Write
    to_rows: bool = False

    @property
    def num_operands(self) -> int:
        return 2 if self.to_rows else 1


@final
class _Trace:
    """A closure while it is traced: the value of `Frame.closure`."""

    def __init__(self, peek: Peek) -> None:
        self.changes: list[tuple[ClosureWrite | ServerUpdate, list[jax.Array]]] = []
        self.rows: list[jax.Array] = []  # those of each lookup
        self.count = 0
        self._peek = peek
        self._seen: dict[int, list[Nest]] = {}
        self._lookups: list[_Lookup] = []

    def begin(self, index: jax.Array) -> None:
        """Begin a pass, in which the index of the worker is `index`."""
        self.changes.clear()
        self.rows.clear()
        self._index = index
        self._trace_state = get_opaque_trace_state()

    def operands(self) -> list[jax.Array]:
        """Return the operands of all changes."""
        return [operand for _, operands in self.changes for operand in operands]

    def worker_index(self) -> jax.Array:
        return self._index

    def peek(self, place: int, count: int) -> list[Nest]:
        self._seen[place] = self._peek(place, count)
        return self._seen[place]

    def kinds_of(self, places: Sequence[int]) -> list[tuple[Any, ...]]:
        """Return the kinds of the elements taken from iterators, by the places of these."""
        remaining = {place: iter(elements) for place, elements in self._seen.items()}
        return [kind_of(next(remaining[place])) for place in places]

    def note_write(self, variable: Variable, write: Write, value: jax.Array) -> None:
        self._require_outside(variable, "written")
        self.changes.append((ClosureWrite(variable, write), [value]))

    def note_rows(
        self, variable: Variable, write: Write, rows: jax.Array, value: jax.Array
    ) -> None:
        self._require_outside(variable, "written")
        self.changes.append((ClosureWrite(variable, write, to_rows=True), [rows, value]))

    def note_updates(self, updates: Sequence[ServerUpdate]) -> None:
        if get_opaque_trace_state() != self._trace_state:
            raise ContextError(
                "Variables on parameter servers were updated inside of a JAX transformation, such "
                "as `lax.scan`, of which the update is no result. Update them after it."
            )
        self.changes += [(update, update.operands) for update in updates]

    def look_up(self, variable: Variable, rows: jax.Array) -> jax.Array:
        self._require_outside(variable, "looked up")
        if any(_changes(change, variable) for change, _ in self.changes):
            raise ContextError(
                f"Rows of variable {variable.name!r} were looked up after the same function had "
                "changed it. Look them up first, or read the whole value."
            )
        number = len(self.rows)
        shape = (*rows.shape, *variable.shape[1:])
        if number == len(self._lookups):
            self._lookups.append(_Lookup(variable, shape))
        self.rows.append(rows)
        program = _context.current().program
        assert program is not None
        return program.next_element(self._lookups[number])  # pyright: ignore[reportArgumentType]

    def _require_outside(self, variable: Variable, done: str) -> None:
        if get_opaque_trace_state() != self._trace_state:
            raise ContextError(
                f"Variable {variable.name!r} is on a parameter server, and was {done} inside of a "
                "JAX transformation, such as `lax.scan`, `lax.cond`, `jax.jit` or "
                "`rx.value_and_grad`. Do it before or after that, and pass values in and out."
            )


def _changes(change: ClosureWrite | ServerUpdate, variable: Variable) -> bool:
    if isinstance(change, ClosureWrite):
        return change.variable is variable
    storage = storage_of(variable)
    assert isinstance(storage, OnServers)
    return any(piece.number in change.changed for piece in storage.pieces)


@final
@dataclass(frozen=True, slots=True)
class Stage:
    """A program, and which inputs of the closure it needs.

    Args:
      exported: The program, as `jax.export` writes it.
      inputs: The indices of its arguments among the inputs of the closure: the values of its
        variables, its arrays, the index of the worker, the arrays of its elements.
    """

    exported: bytes
    inputs: list[int]

    @classmethod
    def of(cls, name: str, jaxpr: ClosedJaxpr, results: range, platforms: Sequence[str]) -> Stage:
        """Return the program of some results of a jaxpr."""
        program, inputs = _part(jaxpr, results)
        return cls(exported(name, program, platforms), inputs)


@final
@dataclass(frozen=True)
class TracedClosure:
    """A closure as programs.

    Args:
      main: The program. Its results are those of the function, then operands of `changes`.
      rows: The program of the rows that it looks up, if there are any, which is run before.
      variables: The variables that come first in its inputs.
      num_arrays: The number of arrays in its inputs.
      taken: The origin of each of its elements: the place of an iterator and the number of arrays
        that its element has, or a variable of which rows are looked up.
      element_kinds: The kinds of the elements of iterators that it is for, in order.
      changes: Its changes, in order.
      count: The number of arrays in its result.
      outputs: How the result is made of them.
    """

    main: Stage
    rows: Stage | None
    variables: list[Variable]
    num_arrays: int
    taken: list[tuple[int, int] | Variable]
    element_kinds: list[Any]
    changes: list[ClosureWrite | ServerUpdate]
    count: int
    outputs: ProgramResults

    @classmethod
    def of(
        cls,
        name: str,
        traced: TracedProgram,
        trace: _Trace,
        taken: TakenElements,
        outputs: ProgramResults,
        num_inputs: int,
        platforms: Sequence[str],
    ) -> TracedClosure:
        complete = traced.captures.complete
        variables = [] if complete else [*traced.written, *traced.read]
        begin = 0 if complete else len(traced.written)
        end = begin + trace.count + len(trace.operands())
        iterators: list[Any] = taken.iterators
        origins = [
            each.variable if isinstance(each, _Lookup) else (each.place, len(element.arrays or ()))
            for each, element in zip(iterators, taken.elements, strict=True)
        ]
        places = [each.place for each in iterators if isinstance(each, IteratorArgument)]
        main = Stage.of(name, traced.jaxpr, range(begin, end), platforms)
        rows = None
        if trace.rows:
            rows = Stage.of(name, traced.jaxpr, range(end, end + len(trace.rows)), platforms)
            _require_known_rows(name, rows, origins, len(variables) + num_inputs)
        return cls(
            main=main,
            rows=rows,
            variables=variables,
            num_arrays=num_inputs - 1,
            taken=origins,
            element_kinds=trace.kinds_of(places),
            changes=[change for change, _ in trace.changes],
            count=trace.count,
            outputs=outputs,
        )


def _require_known_rows(
    name: str, rows: Stage, origins: Sequence[tuple[int, int] | Variable], first: int
) -> None:
    """Refuse rows that are computed from other rows that are looked up."""
    for origin in origins:
        count = 1 if isinstance(origin, Variable) else origin[1]
        if isinstance(origin, Variable) and first in rows.inputs:
            raise InvalidArgument(
                f"`{name}` looks up rows whose numbers depend on rows of {origin.name!r}, which it "
                "looks up as well. Do it in two functions, one after the other."
            )
        first += count


def kind_of(element: Nest) -> tuple[Any, ...]:
    """Return what elements that one program can take have in common, in plain Python."""
    leaves, structure = _nest.flatten(element)
    return str(structure), tuple((np.shape(leaf), str(_dtype_of(leaf))) for leaf in leaves)


def _dtype_of(leaf: Any) -> np.dtype:
    dtype = getattr(leaf, "dtype", None) or np.asarray(leaf).dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def _require_servers(name: str, traced: TracedProgram) -> None:
    for variable in (*traced.written, *traced.read):
        if not isinstance(storage_of(variable), OnServers):
            raise InvalidArgument(
                f"`{name}` uses variable {variable.name!r}, which is not on a parameter server. "
                "Create it in the scope of the strategy, or pass its value as an argument."
            )


def _part(jaxpr: ClosedJaxpr, results: range) -> tuple[ClosedJaxpr, list[int]]:
    """Return the program of some results, and the inputs that it needs."""
    whole = jaxpr_as_fun(jaxpr)
    needed = needed_inputs(jaxpr, results)
    kept = [index for index, is_needed in enumerate(needed) if is_needed]
    shapes = shapes_of(jaxpr)

    def function(*arrays: jax.Array) -> list[jax.Array]:
        given = dict(zip(kept, arrays, strict=True))
        inputs = [
            given[index] if index in given else jnp.zeros(shape.shape, shape.dtype)
            for index, shape in enumerate(shapes)
        ]
        return whole(*inputs)[results.start : results.stop]

    return jax.make_jaxpr(function)(*(shapes[index] for index in kept)), kept


def shapes_of(program: ClosedJaxpr) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the inputs of a program."""
    inputs = [variable.aval for variable in program.jaxpr.invars]
    return [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in inputs]


def exported(name: str, program: ClosedJaxpr, platforms: Sequence[str]) -> bytes:
    """Return a program as `jax.export` writes it."""
    if calls_python(program):
        raise InvalidArgument(
            f"`{name}` calls back into Python, as `jax.debug.print` and `jax.pure_callback` do, "
            "which a program for another process cannot. Return the values, and look at them with "
            "`fetch`."
        )
    export = jax_export.export(jax.jit(jaxpr_as_fun(program)), platforms=list(platforms))
    return bytes(export(*shapes_of(program)).serialize())
