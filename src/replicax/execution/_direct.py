"""Execution of the default strategy: the function is simply called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

from replicax import _context
from replicax._context import Frame, Kind
from replicax._typing import Nest
from replicax.execution._executor import Executor
from replicax.execution._replica_context import Meeting, Merger
from replicax.values import regroup, select
from replicax.variables import all_or_nothing

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


@final
class DirectExecutor(Executor, Merger):
    """One replica, on whatever device JAX would use, that is always alone."""

    def __init__(self, strategy: StrategyLike) -> None:
        self._strategy = strategy

    @property
    def traceable(self) -> bool:
        return True

    def run(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., Any],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        topology = strategy.topology
        with (
            all_or_nothing(frame) as frame,
            _context.entered(replace(frame, kind=Kind.REPLICA)),
        ):
            return fn(*select(tuple(args), 0, topology), **select(dict(kwargs), 0, topology))

    def merge(
        self,
        local_index: int,
        meeting: Meeting,
    ) -> Nest:
        topology = self._strategy.topology
        args, kwargs = regroup([meeting.arguments], topology, always_wrap=meeting.always_wrap)
        with _context.entered(replace(_context.current(), kind=Kind.CROSS_REPLICA)):
            return select(meeting.fn(self._strategy, *args, **kwargs), 0, topology)
