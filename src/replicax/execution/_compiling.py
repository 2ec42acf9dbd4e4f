"""Compiled execution of every function, without being asked."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from jax.errors import (
    ConcretizationTypeError,
    TracerArrayConversionError,
    TracerIntegerConversionError,
)

from replicax._context import Frame
from replicax._hints import hint
from replicax._typing import Nest
from replicax.execution._eager import EagerExecutor
from replicax.execution._executor import Executor
from replicax.execution._function import Function, runs_as_python

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

_MANY_FUNCTIONS = 16  # of the same code, after which the hint to define it once comes
_KEPT = 64  # functions whose programs are kept: those that were run last


@final
class CompilingExecutor(Executor):
    """Runs each function as if it were an `rx.function`, and keeps its programs.

    Eagerly only what an `rx.function` would run so: replicas whose shapes differ, and everything
    after `rx.config.run_functions_eagerly(True)`.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Function] = {}
        self._same_code: Counter[Any] = Counter()
        self._eager = EagerExecutor()

    def run(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., Any],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        if frame.uneven or runs_as_python(frame):
            return self._eager.run(strategy, frame, fn, args, kwargs)
        try:
            return self.prepared(fn).run_by(strategy, frame, args, kwargs)
        except (
            ConcretizationTypeError,
            TracerArrayConversionError,
            TracerIntegerConversionError,
        ) as error:
            error.add_note(
                f"{strategy!r} compiles what is given to `run`, so arrays have no numbers there. "
                "To look at them, use `jax.debug.print`, or call "
                "`rx.config.run_functions_eagerly(True)` first."
            )
            raise

    def prepared(self, fn: Callable[..., Any]) -> Function:
        # Known by the object, not by what the code does: a new function may have been made because
        # a global variable or an object that it uses has changed.
        key = (fn.__func__, id(fn.__self__)) if isinstance(fn, types.MethodType) else id(fn)
        function = self._known.pop(key, None)
        if function is None:
            function = Function(fn)
            self._keep(key, function)
        else:
            self._known[key] = function  # as the last one
        return function

    def _keep(self, key: Any, function: Function) -> None:
        """Which also keeps the function itself, so that no other one gets its id."""
        self._known[key] = function
        if len(self._known) > _KEPT:
            self._known.pop(next(iter(self._known)), None)
        made = function.python_function
        made = made.func if isinstance(made, functools.partial) else made
        code = getattr(made, "__code__", None)
        self._same_code[code] += code is not None
        if self._same_code[code] == _MANY_FUNCTIONS:
            hint(
                f"`{function.__name__}`, given to `run`, was another function object "
                f"{_MANY_FUNCTIONS} times, and is compiled anew each time, which is slow. Define "
                "it once, outside of the loop, and pass what changes as an argument: "
                "`strategy.run(fn, args=(batch, value))`."
            )
