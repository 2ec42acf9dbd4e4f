"""Functions that a coordinator schedules, as programs that workers can run without their code.

A closure is traced like any compiled function. What comes out is a file-like export of its program,
the variables whose values it needs, the elements it takes, and its writes as operations: the
program computes the operands, and the servers of the variables apply them.
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
from replicax.variables import OnServers, Variable, Write, storage_of

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
            return [*outputs.take(result), *(value for _, _, value in trace.writes)]

        arrays = [*self.arrays, np.int32(0)]
        try:
            frame = replace(self._frame, closure=trace)
            with _context.entered(frame):
                traced = trace_program(function, frame, arrays, taken)
        except NotOneProgram:
            raise InvalidType(
                f"`{name}` cannot be a program for a worker: an element that it takes has strings "
                "or objects in it, or it takes elements under a condition. Have the dataset give "
                "arrays of numbers."
            ) from None
        _require_servers(name, traced)
        return TracedClosure.of(name, traced, trace, taken, outputs, len(arrays), platforms)


@final
class _Trace:
    """A closure while it is traced: the value of `Frame.closure`."""

    def __init__(self, peek: Peek) -> None:
        self.writes: list[tuple[Variable, Write, jax.Array]] = []
        self._peek = peek
        self._seen: dict[int, list[Nest]] = {}

    def begin(self, index: jax.Array) -> None:
        """Begin a pass, in which the index of the worker is `index`."""
        self.writes.clear()
        self._index = index
        self._trace_state = get_opaque_trace_state()

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
        if get_opaque_trace_state() != self._trace_state:
            raise ContextError(
                f"Variable {variable.name!r} is on a parameter server, and was written inside of a "
                "JAX transformation, such as `lax.scan`, `lax.cond` or `jax.jit`, of which the "
                "write is no result. Return the value from it, and write it after that."
            )
        self.writes.append((variable, write, value))


@final
@dataclass(frozen=True)
class TracedClosure:
    """A closure as a program.

    Args:
      exported: The program, as `jax.export` writes it. Its arguments are the values of `reads`,
        the arrays `arguments` of the call, the index of the worker if it `takes_index`, and
        the arrays of `elements`. Its results are those of the function, then operands of `writes`.
      reads: The variables whose values it needs.
      arguments: The indices of the arrays of the call that it needs.
      takes_index: Whether it needs the index of the worker.
      taken: The numbers of the iterators from which it takes elements, in order.
      elements: The indices of the arrays, among those of all its elements, that it needs.
      element_kinds: What the elements are like that it is for, in order.
      writes: The variables that it writes, and how, in order.
      count: The number of arrays in its result.
      outputs: How the result is made of them.
    """

    exported: bytes
    reads: list[Variable]
    arguments: list[int]
    takes_index: bool
    taken: list[int]
    elements: list[int]
    element_kinds: list[Any]
    writes: list[tuple[Variable, Write]]
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
        num_arrays: int,
        platforms: Sequence[str],
    ) -> TracedClosure:
        variables = [] if traced.captures.complete else [*traced.written, *traced.read]
        new_states = 0 if traced.captures.complete else len(traced.written)
        program, inputs = _without_states(traced.jaxpr, new_states)
        iterators: list[Any] = taken.iterators
        places = [iterator.place for iterator in iterators]
        count = len(variables)
        end = count + num_arrays
        return cls(
            exported=_exported(name, program, platforms),
            reads=[variables[index] for index in inputs if index < count],
            arguments=[index - count for index in inputs if count <= index < end - 1],
            takes_index=end - 1 in inputs,
            taken=places,
            elements=[index - end for index in inputs if index >= end],
            element_kinds=trace.kinds_of(places),
            writes=[(variable, write) for variable, write, _ in trace.writes],
            count=len(program.jaxpr.outvars) - len(trace.writes),
            outputs=outputs,
        )


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


def _without_states(jaxpr: ClosedJaxpr, new_states: int) -> tuple[ClosedJaxpr, list[int]]:
    """Return a program without its first results, and the inputs that it then needs."""
    whole = jaxpr_as_fun(jaxpr)
    needed = needed_inputs(jaxpr, range(new_states, len(jaxpr.jaxpr.outvars)))
    kept = [index for index, is_needed in enumerate(needed) if is_needed]
    shapes = [
        jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)
        for variable in jaxpr.jaxpr.invars
    ]

    def function(*arrays: jax.Array) -> list[jax.Array]:
        given = dict(zip(kept, arrays, strict=True))
        return whole(
            *(
                given[index] if index in given else jnp.zeros(shape.shape, shape.dtype)
                for index, shape in enumerate(shapes)
            )
        )[new_states:]

    return jax.make_jaxpr(function)(*(shapes[index] for index in kept)), kept


def _exported(name: str, program: ClosedJaxpr, platforms: Sequence[str]) -> bytes:
    if calls_python(program):
        raise InvalidArgument(
            f"`{name}` calls back into Python, as `jax.debug.print` and `jax.pure_callback` do, "
            "which a program for workers cannot. Return the values, and look at them with `fetch`."
        )
    jitted = jax.jit(jaxpr_as_fun(program))
    shapes = [
        jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype)
        for variable in program.jaxpr.invars
    ]
    return bytes(jax_export.export(jitted, platforms=list(platforms))(*shapes).serialize())
