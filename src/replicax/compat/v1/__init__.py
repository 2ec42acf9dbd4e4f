"""`rx.compat.v1`: the counterpart of `tf.compat.v1.distribute`, on the same machinery."""

from replicax import cluster_resolver
from replicax._enums import InputReplicationMode, ReduceOp
from replicax._public import publish as _publish
from replicax.compat.v1 import data, experimental
from replicax.compat.v1._current import get_strategy
from replicax.compat.v1._strategies import MirroredStrategy, OneDeviceStrategy
from replicax.compat.v1._strategy import Strategy
from replicax.execution import ReplicaContext
from replicax.input import InputContext
from replicax.strategies import (
    MultiStepContext,
    RunOptions,
    StrategyExtended,
    experimental_set_strategy,
    get_replica_context,
    has_strategy,
    in_cross_replica_context,
)

__all__ = [
    "InputContext",
    "InputReplicationMode",
    "MirroredStrategy",
    "MultiStepContext",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "data",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]

_publish(globals())
