"""`rx.function`: compiled execution."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    TypeVar,
    cast,
    final,
    overload,
)

import jax

from replicax import _bridges, _context, _nest
from replicax._bridges import Memory
from replicax._context import ContextKind, Frame
from replicax._describing import described
from replicax._hints import hint
from replicax._jax_compat import is_tracing, without_mesh
from replicax._settings import settings
from replicax._typing import Nest
from replicax.errors import (
    AuditFailed,
    ContextError,
    InvalidArgument,
    InvalidType,
)
from replicax.execution._audit import Samples, audit_program
from replicax.execution._cache_key import Signature, signature_of
from replicax.execution._comparison import AuditReport, Tolerance
from replicax.execution._compiled_program import CompiledProgram
from replicax.execution._executor import run_by_executor
from replicax.execution._function_cache import FunctionCache, by_closure
from replicax.execution._input_signature import checked, conformed
from replicax.execution._program_cache import AsPython, ProgramCache

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

P = ParamSpec("P")
R = TypeVar("R")
Rest = ParamSpec("Rest")  # the parameters of a method, without `self`
Instance = TypeVar("Instance")

_DEBUG_NANS = "jax_debug_nans"  # by name, because JAX's stubs lack it
_MANY_UNEVEN_CALLS = 300
_ADVICE = (
    "in a loop over elements, has closed over other values {} times, and is compiled anew each "
    "time, which is slow. Pass what changes as an argument: "
    "`strategy.run(fn, args=(batch, value))`."
)


def run_functions_eagerly(flag: bool) -> None:
    """Make every `rx.function` run as ordinary Python (True), or compiled again (False).

    This is for debugging: breakpoints and prints in the function then see numbers.
    """
    settings.run_eagerly = bool(flag)


def runs_as_python(frame: Frame) -> bool:
    """Tell whether compiled functions run as Python here, such as inside a larger program."""
    return (
        settings.run_eagerly
        or frame.rehearsal is not None
        or frame.program is not None
        or frame.overlay is not None
        or (frame.kind is ContextKind.REPLICA and frame.strategy is not None)
        or getattr(jax.config, _DEBUG_NANS)  # It is for finding the faulty operation.
        or is_tracing()
    )


@final
class Function(Generic[P, R]):
    """A function that is compiled once for each signature; made by `rx.function`."""

    def __init__(
        self, python_function: Callable[P, R], input_signature: Sequence[Nest] | None = None
    ) -> None:
        self.__name__ = type(python_function).__name__  # A partial, say, has no name.
        # The attributes of a callable object, such as a result of `eqx.filter_jit`, are not copied.
        updated = ("__dict__",) if isinstance(python_function, types.FunctionType) else ()
        functools.update_wrapper(self, cast(Any, python_function), updated=updated)
        self.python_function: Callable[..., R] = python_function
        self.input_signature = checked(self.__name__, input_signature)
        self._programs = ProgramCache(self.__name__, python_function)
        # Functions that it passes to `run` in a loop of steps, and one that does several of them.
        self._inner = FunctionCache(Function, by_closure, _ADVICE)
        self._uneven_calls = 0
        self._samples = Samples()
        self._memory: Memory = {}  # what the bridges to other libraries remember

    @property
    def tracing_count(self) -> int:
        """The number of signatures it has been traced for."""
        return self._programs.tracing_count

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        frame = _context.current()
        if runs_as_python(frame):
            return self.python_function(*args, **kwargs)
        return self._call(None, frame, args, kwargs)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Function[P, R]: ...
    @overload
    def __get__(
        self: Function[Concatenate[Instance, Rest], R],
        instance: Instance,
        owner: type | None = None,
    ) -> FunctionOfInstance[Rest, R]: ...
    def __get__(self, instance: object, owner: type | None = None) -> object:
        return self if instance is None else FunctionOfInstance(self, instance)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Return the program for these arguments, without running it.

        `.as_text()` shows it as JAX hands it to XLA, `.compile().as_text()` as XLA has compiled it,
        and `.cost_analysis()` what it costs. A `jax.ShapeDtypeStruct` can stand for an array.
        """
        return self.trace(*args, **kwargs).lower()

    @without_mesh
    def trace(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """Return the program for these arguments, one stage before `lower`: `.jaxpr` shows it."""
        signature, arrays = self._signature(None, _context.current(), args, kwargs)
        program, arrays = self._programs.program(signature, arrays, take=False)
        return self._compiled(program).trace(arrays)

    def audit(self, args: tuple[Nest, ...], kwargs: Nest, tolerance: Tolerance) -> AuditReport:
        """Call the function compiled and eagerly from the same state; see `rx.audit`."""
        frame = _context.current()
        if runs_as_python(frame):
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

    def _compiled(self, program: CompiledProgram | AsPython) -> CompiledProgram:
        if isinstance(program, AsPython):
            raise InvalidArgument(
                f"`{self.__name__}` runs eagerly for these arguments, because {program.value}; "
                "there is no program to show or to audit."
            )
        return program

    @without_mesh
    def _call(
        self, strategy: StrategyLike | None, frame: Frame, args: tuple[Nest, ...], kwargs: Nest
    ) -> Nest:
        if self.input_signature is not None:
            args = conformed(self.__name__, self.input_signature, args, kwargs)
        tolerance = self._samples.next()
        if tolerance is not None:
            program = self._program_of(strategy, frame, args, kwargs)
            if isinstance(program, CompiledProgram):
                report = self._audited(program, strategy, frame, args, kwargs, tolerance)
                if not report.ok:
                    raise AuditFailed(report)
                return report.result
        return self._execute(strategy, frame, args, kwargs)

    def _program_of(
        self, strategy: StrategyLike | None, frame: Frame, args: tuple[object, ...], kwargs: object
    ) -> CompiledProgram | AsPython:
        """Return the program that a call would run, without taking elements of iterators."""
        signature, arrays = self._signature(strategy, frame, args, kwargs)
        self._require_numbers(arrays)
        return self._programs.program(signature, arrays, take=False)[0]

    def _audited(
        self,
        program: CompiledProgram,
        strategy: StrategyLike | None,
        frame: Frame,
        args: tuple[object, ...],
        kwargs: object,
        tolerance: Tolerance,
    ) -> AuditReport:
        def rehearsed() -> Nest:
            # The function gets containers of its own, because it may change them.
            own = _nest.transform(lambda leaf: leaf, (args, kwargs), keep_opaque=True)
            if strategy is not None:
                return run_by_executor(strategy, self.python_function, *own)
            return _bridges.surrounded(self.python_function)(*own[0], **own[1])

        return audit_program(
            self.__name__,
            program,
            rehearsed,
            lambda: self._execute(strategy, frame, args, kwargs),
            tolerance,
        )

    def _execute(
        self, strategy: StrategyLike | None, frame: Frame, args: tuple[Nest, ...], kwargs: Nest
    ) -> Nest:
        signature, arrays = self._signature(strategy, frame, args, kwargs)
        self._require_numbers(arrays)
        program, arrays = self._programs.program(signature, arrays)
        if isinstance(program, CompiledProgram):
            if program.uneven:
                self._warn_of_uneven_shares()
            return program(arrays)
        frame = _context.current()
        if program is AsPython.LOOP:
            frame = replace(frame, runs=self._inner)
        else:
            # Replicas that do different things are not a single program: each runs separately.
            if program is AsPython.UNEVEN:
                self._warn_of_uneven_shares()
            frame = replace(frame, uneven=True, runs=None)
        with _context.entered(frame):
            if strategy is None:
                return self.python_function(*args, **kwargs)
            return run_by_executor(strategy, self.python_function, args, kwargs)

    def _require_numbers(self, arrays: Sequence[object]) -> None:
        if any(isinstance(array, jax.ShapeDtypeStruct) for array in arrays):
            raise InvalidType(
                f"`{self.__name__}` was called with a `jax.ShapeDtypeStruct`, which has no "
                "numbers. Only `lower` and `trace` take one."
            )

    def _signature(
        self, strategy: StrategyLike | None, frame: Frame, args: tuple[object, ...], kwargs: object
    ) -> tuple[Signature | None, list[Any]]:
        _bridges.load()
        return signature_of(strategy, frame, self.python_function, args, kwargs, self._memory)

    def _warn_of_uneven_shares(self) -> None:
        self._uneven_calls += 1
        if self._uneven_calls == _MANY_UNEVEN_CALLS:
            hint(
                f"`{self.__name__}` has been called {_MANY_UNEVEN_CALLS} times with shares of "
                "different shapes, for each of which every device computes the step, or with "
                "strings, for which it runs eagerly. It is faster with a global batch that divides "
                "by the number of replicas, and arrays of numbers."
            )

    def __repr__(self) -> str:
        return f"<rx.function {self.__name__}>"

    __name__: str


@final
class FunctionOfInstance(Generic[P, R]):
    """A compiled function that was found as an attribute of an object."""

    def __init__(self, function: Function[..., R], instance: object) -> None:
        self.function = function
        self.instance = instance

    @property
    def tracing_count(self) -> int:
        return self.function.tracing_count

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(self.instance, *args, **kwargs)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        return self.function.lower(self.instance, *args, **kwargs)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        return self.function.trace(self.instance, *args, **kwargs)


@overload
def function(
    fn: Callable[P, R],
    *,
    input_signature: Sequence[Nest] | None = None,
    autograph: bool | None = None,
    jit_compile: bool | None = None,
    reduce_retracing: bool | None = None,
) -> Function[P, R]: ...
@overload
def function(
    fn: None = None,
    *,
    input_signature: Sequence[Nest] | None = None,
    autograph: bool | None = None,
    jit_compile: bool | None = None,
    reduce_retracing: bool | None = None,
) -> Callable[[Callable[P, R]], Function[P, R]]: ...
def function(
    fn: Callable[..., object] | None = None,
    *,
    input_signature: Sequence[Nest] | None = None,
    autograph: bool | None = None,
    jit_compile: bool | None = None,
    reduce_retracing: bool | None = None,
) -> Any:
    """Compile a function: one SPMD program per call, traced once for each signature.

    Variables that it reads and writes are found by tracing. It can be called directly, with
    `strategy.run` inside, or be passed to `strategy.run`.

    Args:
      fn: The function. Arrays in its arguments may change from call to call; every other value
        makes a program of its own. Without `fn`, `function` is a decorator with arguments.
      input_signature: A sequence of `jax.ShapeDtypeStruct`, one for each positional argument (or
        nests of them): other arguments are refused.
      autograph: Accepted as in `tf.function`, but without effect: Python's `if` and `while` are
        never rewritten. For conditions on arrays use `jax.lax.cond` and the like.
      jit_compile: Likewise without effect: every program is compiled by XLA.
      reduce_retracing: Likewise without effect: XLA needs to know shapes, so each has a program.

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
    function: Callable[..., object],
    /,
    *args: object,
    rtol: float | None = None,
    atol: float | None = None,
    **kwargs: object,
) -> AuditReport:
    """Call a function compiled and eagerly from the same state, and compare the results.

    Every output and every variable is compared. The state afterwards is that of the compiled call,
    and elements are taken from iterators once. The function is called one extra time, so its side
    effects, such as printing, happen one extra time.

    Args:
      function: An `rx.function`, or a function that is to be compiled.
      *args: Its arguments.
      rtol: The difference that is allowed, relative to the largest element of an array; by
        default, what rounding explains for its dtype.
      atol: The absolute difference that is always allowed.
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
