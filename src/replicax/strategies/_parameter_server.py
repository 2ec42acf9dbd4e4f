"""Variables on parameter servers, and functions that a coordinator schedules on workers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, final

from replicax.cluster import ClusterResolver
from replicax.execution import DirectExecutor
from replicax.parameter_server import Engine, RayEngine
from replicax.strategies._extended import StrategyExtended
from replicax.strategies._strategy import Strategy
from replicax.topology import Topology, best_devices
from replicax.variables import ServerPlacement, VariablePartitioner

Coordinator = TypeVar("Coordinator")


@final
class ParameterServerStrategy(Strategy):
    """Variables on parameter servers, and asynchronous steps on workers that may come and go.

    The program of the chief makes it, and schedules functions with an
    `rx.coordinator.ClusterCoordinator`. It runs on Ray: `pip install 'replicax[ray]'`; see
    docs/parameter_servers.md.

    Args:
      cluster_resolver: Describes the cluster. With a `RayClusterResolver`, Ray starts the workers
        and servers; with another one, they are programs that call `rx.Server(...).join()`.
      variable_partitioner: A function of a shape and a dtype that returns the number of parts for
        each dimension, such as those in `rx.experimental.partitioners`. The first dimension may
        have several, which are on different servers. By default variables stay whole.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver,
        variable_partitioner: VariablePartitioner | None = None,
    ) -> None:
        engine = RayEngine(cluster_resolver)
        super().__init__(parameter_server(self, engine, variable_partitioner, cluster_resolver))
        self._engine: Engine = engine
        self._lock = threading.Lock()
        self._coordinator: Any = None
        # Also when the program ends.
        weakref.finalize(self, engine.stop)

    def _companion(self, make: Callable[[], Coordinator]) -> Coordinator:
        """Return the only coordinator of this strategy, made when it is first asked for."""
        with self._lock:
            if self._coordinator is None:
                self._coordinator = make()
            return self._coordinator


def parameter_server(
    strategy: Strategy,
    engine: Engine,
    variable_partitioner: VariablePartitioner | None = None,
    cluster_resolver: ClusterResolver | None = None,
) -> StrategyExtended:
    """Return the parts of a strategy with variables on the servers of an engine."""
    return StrategyExtended(
        strategy,
        topology=Topology.of(best_devices()[:1]),
        placement=ServerPlacement(engine.servers, variable_partitioner),
        executor=DirectExecutor(strategy),
        cluster_resolver=cluster_resolver,
    )
