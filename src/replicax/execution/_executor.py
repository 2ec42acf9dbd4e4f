"""The contract of an execution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from replicax._context import Frame
from replicax._describing import described
from replicax._typing import Nest
from replicax.errors import InvalidType

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


def require_call(method: str, fn: Any, args: Any) -> None:
    """Refuses what `method` cannot call."""
    if not callable(fn):
        raise InvalidType(f"`{method}` needs a function; got {described(fn)}.")
    if not isinstance(args, (tuple, list)):
        raise InvalidType(
            f"`args` of `{method}` has to be a tuple or a list; got {type(args).__name__}. For a "
            "single argument write `args=(x,)`."
        )


class Executor(ABC):
    """Runs a function once on every replica and merges what they return."""

    @property
    def traceable(self) -> bool:
        """Whether it can be used as it is while a program is traced."""
        return False

    def prepared(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """What it runs in place of a function: an `rx.function`, if it compiles all of them."""
        return fn

    @abstractmethod
    def run(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., Any],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        """Calls `fn` in replica context; `frame` is the cross-replica context of the call."""
