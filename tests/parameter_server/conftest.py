"""A strategy over servers and workers of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from in_memory_servers import InMemoryEngine

import replicax as rx

RESOLVER = rx.cluster_resolver.RayClusterResolver(num_workers=2, num_ps=2)


class InMemory:
    """A strategy, its coordinator and its engine."""

    def __init__(self, engine: InMemoryEngine, partitioner=None) -> None:
        self.engine = engine
        self.strategy = rx.ParameterServerStrategy(RESOLVER, partitioner)
        self.coordinator = rx.coordinator.ClusterCoordinator(self.strategy)

    def variable(self, *args, **kwargs) -> rx.Variable:
        with self.strategy.scope():
            return rx.Variable(*args, **kwargs)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., InMemory]]:
    """Return a function that makes a strategy with so many workers and servers."""
    made: list[InMemory] = []

    def make(workers: int = 2, servers: int = 2, partitioner=None, prepare=None) -> InMemory:
        engine = InMemoryEngine(workers, servers)
        if prepare is not None:
            engine.prepare = prepare
        with monkeypatch.context() as patched:
            patched.setattr(
                "replicax.strategies._parameter_server.RayEngine", lambda resolver: engine
            )
            made.append(InMemory(engine, partitioner))
        return made[-1]

    yield make
    for each in made:
        each.coordinator._stop()
        each.engine.stop()
