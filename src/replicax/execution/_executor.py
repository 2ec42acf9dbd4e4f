"""The contract of an execution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from replicax import _context
from replicax._context import Frame
from replicax._describing import described
from replicax._typing import Nest
from replicax.errors import InvalidType

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


def require_call(method: str, fn: object, args: object) -> None:
    """Refuse anything that `method` cannot call."""
    if not callable(fn):
        raise InvalidType(f"`{method}` needs a function; got {described(fn)}.")
    if not isinstance(args, (tuple, list)):
        raise InvalidType(
            f"`args` of `{method}` must be a tuple or a list; got {type(args).__name__}. For a "
            "single argument write `args=(x,)`."
        )


class Executor(ABC):
    """A way to run a function once on every replica and merge the results."""

    @property
    def traceable(self) -> bool:
        """True if it can also be used while a program is traced."""
        return False

    def prepared(self, fn: Callable[..., object]) -> Callable[..., object]:
        """Return the function to run for `fn`, such as an `rx.function` that compiles it."""
        return fn

    @abstractmethod
    def run(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        """Call `fn` in replica context; `frame` is the cross-replica context of the call."""


def run_by_executor(
    strategy: StrategyLike,
    fn: Callable[..., object],
    args: Sequence[Nest],
    kwargs: Mapping[str, Nest],
) -> Nest:
    """Run a function with the strategy's executor or, in a program, with the program's.

    `Strategy.run` has already checked the call, which may be that of a compiled function.
    """
    frame = _context.cross_replica(strategy, "run")
    executor = strategy._executor
    if frame.program is not None and not executor.traceable:
        executor = frame.program.executor
    return executor.run(strategy, frame, fn, args, kwargs)
