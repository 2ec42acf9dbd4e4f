"""Compiled execution of every function, without an explicit `rx.function`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from jax.errors import (
    ConcretizationTypeError,
    TracerArrayConversionError,
    TracerIntegerConversionError,
)

from replicax._context import Frame
from replicax._typing import Nest
from replicax.execution._eager import EagerExecutor
from replicax.execution._executor import Executor
from replicax.execution._function import Function, runs_as_python
from replicax.execution._function_cache import FunctionCache, by_object

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

_ADVICE = (
    "was another function object {} times, and is compiled anew each time, which is slow. Define "
    "it once, outside of the loop, and pass what changes as an argument: "
    "`strategy.run(fn, args=(batch, value))`."
)


@final
class CompilingExecutor(Executor):
    """Execution of each function as if it were an `rx.function`, whose programs are kept.

    Only what an `rx.function` would run eagerly is run eagerly: replicas that are not one program,
    and everything after `rx.config.run_functions_eagerly(True)`.
    """

    def __init__(self) -> None:
        self._functions = FunctionCache(Function, by_object, _ADVICE)
        self._eager = EagerExecutor()

    def run(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        if frame.uneven or runs_as_python(frame):
            return self._eager.run(strategy, frame, fn, args, kwargs)
        try:
            return self.prepared(fn)._call(strategy, frame, tuple(args), dict(kwargs))
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

    def prepared(self, fn: Callable[..., object]) -> Function[..., Any]:
        return self._functions.compiled(fn)
