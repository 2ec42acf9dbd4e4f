"""Execution of a strategy of one replica without a device of its own: the function is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, final

from replicax import _bridges, _context, _nest
from replicax._context import ContextKind, Frame
from replicax._typing import Nest, Values
from replicax.collectives import regroup
from replicax.execution._executor import Executor
from replicax.execution._replica_context import Meeting, Merger, ReplicaContext
from replicax.values import DistributedValues
from replicax.variables import all_or_nothing

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


@final
class DirectExecutor(Executor, Merger):
    """A single replica on JAX's default device, or wherever a program runs."""

    def __init__(self, strategy: StrategyLike) -> None:
        self._strategy = strategy

    @property
    def traceable(self) -> bool:
        return True

    def run(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        with (
            all_or_nothing(frame) as frame,
            _context.entered(replace(frame, kind=ContextKind.REPLICA, replica=self._replica())),
        ):
            fn = _bridges.surrounded(fn)
            return fn(*_unwrapped(tuple(args)), **_unwrapped(dict(kwargs)))

    def merge(
        self,
        local_index: int,
        meeting: Meeting,
    ) -> Nest:
        topology = self._strategy.topology
        args, kwargs = regroup([meeting.arguments], topology, always_wrap=meeting.always_wrap)
        with _context.entered(_across_replicas()):
            return _unwrapped(meeting.fn(self._strategy, *args, **kwargs))

    def once(self, local_index: int, label: str, make: Callable[[], Values]) -> Values:
        with _context.entered(_across_replicas()):
            return make()

    def _replica(self) -> ReplicaContext | None:
        """Return the replica of a frame; None for that of the default strategy, as everywhere."""
        if self._strategy.identity is None:
            return None
        devices = self._strategy.topology.local_devices
        return ReplicaContext(self._strategy, self, 0, 0, 1, devices)


def _across_replicas() -> Frame:
    return replace(_context.current(), kind=ContextKind.CROSS_REPLICA, replica=None)


def _unwrapped(nest: Nest) -> Nest:
    """Replace distributed values with their only component; arrays stay where they are."""
    return _nest.transform(
        lambda leaf: leaf.component(0) if isinstance(leaf, DistributedValues) else leaf,
        nest,
        keep_opaque=True,
    )
