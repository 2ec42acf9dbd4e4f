"""The parts of strategies, for users who write their own."""

from replicax._public import publish as _publish
from replicax.execution import CompilingExecutor, EagerExecutor, Executor
from replicax.strategies import DescribedVariable, VariableTable
from replicax.topology import Topology
from replicax.variables import (
    AggregatingVariable,
    MirroredPlacement,
    MirroredVariable,
    OneDevicePlacement,
    ParameterDevicePlacement,
    PlainVariable,
    ServerVariable,
    ShardedPlacement,
    SyncOnReadVariable,
    VariablePlacement,
    VariableRequest,
)

__all__ = [
    "AggregatingVariable",
    "CompilingExecutor",
    "DescribedVariable",
    "EagerExecutor",
    "Executor",
    "MirroredPlacement",
    "MirroredVariable",
    "OneDevicePlacement",
    "ParameterDevicePlacement",
    "PlainVariable",
    "ServerVariable",
    "ShardedPlacement",
    "SyncOnReadVariable",
    "Topology",
    "VariablePlacement",
    "VariableRequest",
    "VariableTable",
]

_publish(globals())
