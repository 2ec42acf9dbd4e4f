"""The contract of an execution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from replicax._context import Frame
from replicax._typing import Nest

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


class Executor(ABC):
    """Runs a function once on every replica and merges what they return."""

    @property
    def traceable(self) -> bool:
        """Whether it can be used as it is while a program is traced."""
        return False

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
