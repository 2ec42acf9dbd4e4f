"""Strategies: each way to distribute, made of its parts."""

from replicax.strategies._central_storage import CentralStorageStrategy, central_storage
from replicax.strategies._combining import Axis
from replicax.strategies._current import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from replicax.strategies._extended import StrategyExtended
from replicax.strategies._fully_sharded import (
    FullyShardedStrategy,
    MultiWorkerFullyShardedStrategy,
)
from replicax.strategies._mirrored import MirroredStrategy, mirrored
from replicax.strategies._multi_worker import (
    ExperimentalMultiWorkerMirroredStrategy,
    MultiWorkerMirroredStrategy,
    multi_worker,
)
from replicax.strategies._one_device import OneDeviceStrategy, one_device
from replicax.strategies._parameter_server import ParameterServerStrategy
from replicax.strategies._steps import MultiStepContext
from replicax.strategies._strategy import RunOptions, Strategy, ValueContext
from replicax.strategies._tpu import ExperimentalTPUStrategy, TPUStrategy, tpu
from replicax.strategies._variable_table import DescribedVariable, VariableTable

__all__ = [
    "Axis",
    "CentralStorageStrategy",
    "DescribedVariable",
    "ExperimentalMultiWorkerMirroredStrategy",
    "ExperimentalTPUStrategy",
    "FullyShardedStrategy",
    "MirroredStrategy",
    "MultiStepContext",
    "MultiWorkerFullyShardedStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "ValueContext",
    "VariableTable",
    "central_storage",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "mirrored",
    "multi_worker",
    "one_device",
    "tpu",
]
