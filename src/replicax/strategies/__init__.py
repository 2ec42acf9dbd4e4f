"""Strategies: which parts make which way to distribute."""

from replicax.strategies._central_storage import CentralStorageStrategy
from replicax.strategies._current import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from replicax.strategies._extended import StrategyExtended
from replicax.strategies._mirrored import MirroredStrategy
from replicax.strategies._multi_worker import (
    ExperimentalMultiWorkerMirroredStrategy,
    MultiWorkerMirroredStrategy,
)
from replicax.strategies._one_device import OneDeviceStrategy
from replicax.strategies._strategy import RunOptions, Strategy, ValueContext

__all__ = [
    "CentralStorageStrategy",
    "ExperimentalMultiWorkerMirroredStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "ValueContext",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
