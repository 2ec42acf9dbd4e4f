"""The strategy outside of every scope."""

from __future__ import annotations

import functools
from typing import Any, final

from replicax._typing import StrategyLike
from replicax.execution import DirectExecutor, ReplicaContext
from replicax.strategies._extended import StrategyExtended
from replicax.strategies._strategy import Strategy
from replicax.topology import Topology, best_devices
from replicax.variables import OneDevicePlacement


@final
class DefaultStrategy(Strategy):
    """One replica, on the device that JAX would use, always in replica context: nothing changes."""

    def __init__(self) -> None:
        executor = DirectExecutor(self)
        topology = Topology.of(best_devices()[:1])
        super().__init__(
            StrategyExtended(
                self, topology=topology, placement=OneDevicePlacement(), executor=executor
            )
        )
        self.replica_context = ReplicaContext(self, executor, 0, 0, 1, topology.local_devices)

    @property
    def identity(self) -> StrategyLike | None:
        return None

    def __repr__(self) -> str:
        return "the default strategy"

    def __reduce__(self) -> Any:
        return default_strategy, ()


@functools.lru_cache(maxsize=1)
def default_strategy() -> DefaultStrategy:
    """Return the only default strategy, made on first use because it must know the devices."""
    return DefaultStrategy()
