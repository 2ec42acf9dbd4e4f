"""`rx.function`: compiled execution."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final, overload

import jax

from replicax import _bridges, _context, _nest
from replicax._context import Frame, Kind
from replicax._describing import described
from replicax._hints import hint
from replicax._jax_compat import is_tracing, without_mesh
from replicax._typing import Nest
from replicax.errors import (
    AuditFailed,
    ContextError,
    InvalidArgument,
    InvalidType,
)
from replicax.execution._audit import Samples, audit_program
from replicax.execution._comparison import AuditReport, Tolerance
from replicax.execution._compiled_runs import CompiledRuns
from replicax.execution._input_signature import checked, conformed
from replicax.execution._operands import python_numbers
from replicax.execution._pulling import (
    AtItsEnd,
    NotOneProgram,
    Pulling,
    Pulls,
    TakesElementsInLoop,
)
from replicax.execution._recipes import add_recipe
from replicax.execution._signature import Signature, signature_of
from replicax.execution._state_lifting import Lifted

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

_DEBUG_NANS = "jax_debug_nans"  # by name, for JAX's stubs do not know it
_MANY_TRACES = 10
_MANY_UNEVEN_CALLS = 300
_MOST_UNEVEN_PROGRAMS = 16  # of other combinations of shapes, calls are faster eager than traced
_eagerly = False


class _AsPython(enum.Enum):
    """Why a function is not one program, and runs as Python."""

    UNEVEN = (
        "replicas whose shapes differ do not all do the same, or an argument is no array of numbers"
    )
    AT_END = "an iterator is at its end"
    LOOP = "it has a loop over a dataset, or of steps, and only what is inside of it is compiled"


_Pulling = Pulling[Lifted | _AsPython]


def run_functions_eagerly(flag: bool) -> None:
    """Makes every `rx.function` run as ordinary Python (True), or compiled again (False).

    For debugging: breakpoints and prints in the function then see numbers.
    """
    global _eagerly
    _eagerly = bool(flag)


def runs_as_python(frame: Frame) -> bool:
    """Whether a compiled function is called as Python here, as part of something larger."""
    return (
        _eagerly
        or frame.rehearsal is not None
        or frame.program is not None
        or frame.overlay is not None
        or (frame.kind is Kind.REPLICA and frame.strategy is not None)
        or getattr(jax.config, _DEBUG_NANS)  # which is for finding the operation
        or is_tracing()
    )


@final
class Function:
    """A function that is compiled, once for each signature; made by `rx.function`."""

    def __init__(self, python_function: Callable[..., Any], input_signature: Any = None) -> None:
        self.__name__ = type(python_function).__name__  # of a partial, say, which has no name
        # Of an object that is callable, such as one of `eqx.filter_jit`, attributes are its own.
        updated = ("__dict__",) if isinstance(python_function, types.FunctionType) else ()
        functools.update_wrapper(self, python_function, updated=updated)
        self.python_function = python_function
        self.input_signature = checked(self.__name__, input_signature)
        self._programs: dict[Any, Lifted | _Pulling | _AsPython] = {}
        self._runs = CompiledRuns(Function)
        self._warned = False
        self._uneven_calls = 0
        self._uneven_traces = 0
        self._samples = Samples()
        self._last_signature: Signature | None = None
        self._memory: dict[Any, Any] = {}  # of the bridges to other libraries

    @property
    def tracing_count(self) -> int:
        """How many signatures it has been traced for."""
        entries = self._programs.values()
        ways = [way for entry in entries if isinstance(entry, Pulling) for way in entry.ways]
        return sum(not isinstance(entry, Pulling) for entry in entries) + sum(
            isinstance(way, Lifted) for way in ways
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = _context.current()
        if self.is_inlined(frame):
            return self.python_function(*args, **kwargs)
        return self._call(None, frame, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else FunctionOfInstance(self, instance)

    def is_inlined(self, frame: Frame) -> bool:
        """Whether it is part of something larger, which decides how it is executed."""
        return runs_as_python(frame)

    def run_by(
        self,
        strategy: StrategyLike,
        frame: Frame,
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        """`strategy.run` of this function, as one program."""
        return self._call(strategy, frame, tuple(args), dict(kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program for these arguments, without running it.

        `.as_text()` shows it as JAX hands it to XLA, `.compile().as_text()` as XLA made it,
        `.cost_analysis()` what it costs. A `jax.ShapeDtypeStruct` can stand for an array.
        """
        return self.trace(*args, **kwargs).lower()

    @without_mesh
    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """The program for these arguments, one stage before `lower`: `.jaxpr` shows it."""
        signature, arrays = self._signature(None, _context.current(), args, kwargs)
        program, arrays = self._program(signature, arrays, take=False)
        return self._compiled(program).trace(arrays)

    def audit(self, args: tuple[Any, ...], kwargs: Any, tolerance: Tolerance) -> AuditReport:
        """Call it compiled and eagerly from the same state; see `rx.audit`."""
        frame = _context.current()
        if self.is_inlined(frame):
            raise ContextError(
                f"`{self.__name__}` was to be audited where functions run as Python, and there is "
                f"nothing to compare. Current context: {frame}. Call `rx.audit` outside of `run` "
                "and of other functions, without `rx.config.run_functions_eagerly` and "
                "`jax_debug_nans`."
            )
        if self.input_signature is not None:
            args = conformed(self.__name__, self.input_signature, args, kwargs)
        program = self._compiled(self._program_of(None, frame, args, kwargs))
        return self._audited(program, None, frame, args, kwargs, tolerance)

    def _compiled(self, program: Lifted | _AsPython) -> Lifted:
        if isinstance(program, _AsPython):
            raise InvalidArgument(
                f"`{self.__name__}` runs eagerly for these arguments, because {program.value}; "
                "there is no program to show or to audit."
            )
        return program

    @without_mesh
    def _call(
        self, strategy: StrategyLike | None, frame: Frame, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if self.input_signature is not None:
            args = conformed(self.__name__, self.input_signature, args, kwargs)
        tolerance = self._samples.next()
        if tolerance is not None:
            program = self._program_of(strategy, frame, args, kwargs)
            if isinstance(program, Lifted):
                report = self._audited(program, strategy, frame, args, kwargs, tolerance)
                if not report.ok:
                    raise AuditFailed(report)
                return report.result
        return self._execute(strategy, frame, args, kwargs)

    def _program_of(
        self, strategy: StrategyLike | None, frame: Frame, args: tuple[Any, ...], kwargs: Any
    ) -> Lifted | _AsPython:
        """Return what a call is going to run, without taking elements of iterators."""
        signature, arrays = self._signature(strategy, frame, args, kwargs)
        self._require_numbers(arrays)
        return self._program(signature, arrays, take=False)[0]

    def _audited(
        self,
        program: Lifted,
        strategy: StrategyLike | None,
        frame: Frame,
        args: tuple[Any, ...],
        kwargs: Any,
        tolerance: Tolerance,
    ) -> AuditReport:
        def rehearsed() -> Nest:
            # In containers of its own, which the function may change.
            own = _nest.transform(lambda leaf: leaf, (args, kwargs), handed=True)
            if strategy is not None:
                return strategy.run(self.python_function, *own)
            return _bridges.surrounded(self.python_function)(*own[0], **own[1])

        return audit_program(
            self.__name__,
            program,
            rehearsed,
            lambda: self._execute(strategy, frame, args, kwargs),
            tolerance,
        )

    def _execute(
        self, strategy: StrategyLike | None, frame: Frame, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        signature, arrays = self._signature(strategy, frame, args, kwargs)
        self._require_numbers(arrays)
        program, arrays = self._program(signature, arrays)
        if isinstance(program, Lifted):
            if program.uneven:
                self._warn_of_uneven_shares()
            return program(arrays)
        frame = _context.current()
        if program is _AsPython.LOOP:
            frame = replace(frame, runs=self._runs)
        else:
            # Replicas that differ in what they do are no single program: each runs by itself.
            if program is _AsPython.UNEVEN:
                self._warn_of_uneven_shares()
            frame = replace(frame, uneven=True, runs=None)
        with _context.entered(frame):
            if strategy is None:
                return self.python_function(*args, **kwargs)
            return strategy.run(self.python_function, args, kwargs)

    def _require_numbers(self, arrays: Sequence[Any]) -> None:
        if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
            raise InvalidType(
                f"`{self.__name__}` was called with a `jax.ShapeDtypeStruct`, which has no "
                "numbers. Only `lower` and `trace` take one."
            )

    def _signature(
        self, strategy: StrategyLike | None, frame: Frame, args: tuple[Any, ...], kwargs: Any
    ) -> tuple[Signature | None, list[Any]]:
        _bridges.load()
        return signature_of(strategy, frame, self.python_function, args, kwargs, self._memory)

    def _program(
        self, signature: Signature | None, arrays: list[Any], *, take: bool = True
    ) -> tuple[Lifted | _AsPython, list[Any]]:
        """The program for a call, and its arrays: those in the arguments, and those of elements.

        Unless told otherwise, the elements are taken from their iterators.
        """
        if signature is None:
            return _AsPython.UNEVEN, arrays
        leaves = signature.leaves
        entry = self._programs.get(signature)
        if entry is None:
            entry = self._trace(signature, arrays)
        if not isinstance(entry, Pulling):
            return entry, arrays
        found = entry.way(leaves)
        if found is None:
            entry = self._trace(signature, arrays, entry)
            found = entry.way(leaves) if isinstance(entry, Pulling) else None
        if found is None:
            return entry if isinstance(entry, _AsPython) else _AsPython.UNEVEN, arrays
        program, iterators, elements = found
        if isinstance(program, _AsPython):
            return program, arrays
        if take:
            for iterator in iterators:
                next(iterator)
        return program, [*arrays, *(array for e in elements for array in e.arrays or ())]

    def _trace(
        self, signature: Signature, arrays: list[Any], pulling: _Pulling | None = None
    ) -> Lifted | _Pulling | _AsPython:
        """What to do with calls of this signature: it is noted, but for what ends with this call.

        `pulling` has the ways for elements of other kinds that were seen.
        """
        takes_uneven = self._uneven_traces < _MOST_UNEVEN_PROGRAMS
        pulls = Pulls(takes_uneven=takes_uneven)
        leaves = signature.leaves

        def uneven() -> bool:
            return signature.uneven or any(element.uneven for element in pulls.elements)

        try:
            if signature.uneven and not takes_uneven:
                raise NotOneProgram
            way = self._lifted(signature, arrays, pulls)
        except AtItsEnd:
            return _AsPython.AT_END
        except TakesElementsInLoop:
            way = _AsPython.LOOP
        except NotOneProgram:
            way = _AsPython.UNEVEN
        except Exception as error:
            if not uneven():
                add_recipe(error)
                raise
            # An error of a replica's own shapes, say. The eager run meets it too, and says which
            # replica it was; and what only a trace cannot do has always worked there.
            way = _AsPython.UNEVEN
        self._uneven_traces += uneven()
        entry: Lifted | _Pulling | _AsPython = way
        # A loop is Python whatever the elements are, so a call of it looks at none of them first.
        if way is not _AsPython.LOOP and (pulls.iterators or pulling is not None):
            entry = pulling or Pulling()
            entry.add(pulls, self.python_function, leaves, way)
        reason = "the elements of an iterator changed their shapes"
        if pulling is None:
            signature.forget_values()
            last, self._last_signature = self._last_signature, signature
            reason = "" if last is None else last.difference(signature)
        self._programs[signature] = entry
        if isinstance(way, Lifted):
            self._warn_of_retracing(reason)
        return entry

    def _lifted(self, signature: Signature, arrays: list[Any], pulls: Pulls) -> Lifted:
        bound = signature.bind(self.python_function)
        plain = signature.plain_arrays()
        given = python_numbers(signature.leaves)
        return Lifted(bound, signature.frame, arrays, plain, pulls, given, self.__name__)

    def _warn_of_uneven_shares(self) -> None:
        self._uneven_calls += 1
        if self._uneven_calls == _MANY_UNEVEN_CALLS:
            hint(
                f"`{self.__name__}` has been called {_MANY_UNEVEN_CALLS} times with shares of "
                "different shapes, for each of which every device computes the step, or with "
                "strings, for which it runs eagerly. It is faster with a global batch that divides "
                "by the number of replicas, and arrays of numbers."
            )

    def _warn_of_retracing(self, reason: str) -> None:
        if self._warned or self.tracing_count <= _MANY_TRACES:
            return
        self._warned = True
        hint(
            f"`{self.__name__}` has been traced {self.tracing_count} times, which is slow. The "
            f"last time because {reason}. Pass numbers that change as arrays (`jnp.asarray(x)`), "
            "and batches of one size."
        )

    def __repr__(self) -> str:
        return f"<rx.function {self.__name__}>"

    __name__: str


@final
class FunctionOfInstance:
    """A compiled function that was found as an attribute of an object."""

    def __init__(self, function: Function, instance: Any) -> None:
        self.function = function
        self.instance = instance

    @property
    def tracing_count(self) -> int:
        return self.function.tracing_count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.instance, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        return self.function.lower(self.instance, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self.function.trace(self.instance, *args, **kwargs)


@overload
def function(
    fn: Callable[..., Any],
    *,
    input_signature: Any = None,
    autograph: bool | None = None,
    jit_compile: bool | None = None,
    reduce_retracing: bool | None = None,
) -> Function: ...
@overload
def function(
    fn: None = None,
    *,
    input_signature: Any = None,
    autograph: bool | None = None,
    jit_compile: bool | None = None,
    reduce_retracing: bool | None = None,
) -> Callable[[Callable[..., Any]], Function]: ...
def function(
    fn: Callable[..., Any] | None = None,
    *,
    input_signature: Any = None,
    autograph: bool | None = None,
    jit_compile: bool | None = None,
    reduce_retracing: bool | None = None,
) -> Any:
    """Compile a function: one SPMD program per call, traced once for each signature.

    Variables that it reads and writes are found by tracing. It can be called as it is, with
    `strategy.run` inside, or be given to `strategy.run`.

    Args:
      fn: The function. Arrays in its arguments may change from call to call; other values make a
        program of their own each. Without it, `function` is a decorator with arguments.
      input_signature: A sequence of `jax.ShapeDtypeStruct`, one for each positional argument (or
        nests of them): other arguments are refused.
      autograph: Accepted as `tf.function` has it, and without effect: Python's `if` and `while`
        are never rewritten. For conditions on arrays use `jax.lax.cond` and its kin.
      jit_compile: The same, without effect: every program is compiled by XLA.
      reduce_retracing: The same, without effect: XLA needs to know shapes, so each has a program.

    >>> import numpy as np, replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     total = rx.Variable(0.0, aggregation="SUM")
    >>> @rx.function
    ... def step(x):
    ...     strategy.run(lambda x: total.assign_add(x), args=(x,))
    ...     return total * 2
    >>> float(step(np.float32(1.0))), float(step(np.float32(2.0)))
    (4.0, 12.0)
    >>> step.tracing_count
    1
    """
    options = {
        "autograph": autograph,
        "jit_compile": jit_compile,
        "reduce_retracing": reduce_retracing,
    }
    for name, value in options.items():
        if value is not None and not isinstance(value, bool):
            raise InvalidType(
                f"`{name}` of `rx.function` must be True, False or None; got {described(value)}. "
                "It changes nothing here, and can be left out."
            )
    if fn is None:
        return lambda fn: function(fn, input_signature=input_signature)
    if isinstance(fn, Function):
        return Function(fn.python_function, input_signature)
    if not callable(fn):
        raise InvalidType(f"`rx.function` compiles a function; got {described(fn)}.")
    return Function(fn, input_signature)


def audit(
    function: Callable[..., Any],
    /,
    *args: Any,
    rtol: float | None = None,
    atol: float | None = None,
    **kwargs: Any,
) -> AuditReport:
    """Call a function compiled and eagerly from the same state, and compare what comes out.

    Every output and every variable is compared. The state afterwards is that of the compiled call,
    and elements are taken from iterators once. The function is called once more than without an
    audit: what it does besides computing, such as printing, it does once more.

    Args:
      function: An `rx.function`, or a function that is to be compiled.
      *args: Its arguments.
      rtol: The difference that is allowed, relative to the largest element of an array; by
        default what rounding explains, by dtype.
      atol: The difference that is allowed whatever the elements are.
      **kwargs: Its keyword arguments.

    Returns:
      An `AuditReport`: `ok`, `differences`, and the `result` of the compiled call.

    >>> import jax.numpy as jnp, replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     total = rx.Variable(0.0, name="total", aggregation="SUM")
    >>> @rx.function
    ... def step(x):
    ...     return strategy.run(lambda x: total.assign_add(x) * 2, args=(x,))
    >>> print(rx.audit(step, jnp.float32(1.0)))
    `step`: compiled and eager agree; arrays compared: 4
    >>> float(total)
    2.0
    """
    if isinstance(function, FunctionOfInstance):
        function, args = function.function, (function.instance, *args)
    if not callable(function):
        raise InvalidType(f"`rx.audit` calls a function; got {described(function)}.")
    compiled = function if isinstance(function, Function) else Function(function)
    return compiled.audit(args, kwargs, Tolerance(rtol, atol))
