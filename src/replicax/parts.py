"""What strategies are made of, for those who make their own."""

from replicax.execution import CompilingExecutor, EagerExecutor, Executor
from replicax.topology import Topology
from replicax.variables import (
    AggregatingVariable,
    MirroredPlacement,
    MirroredVariable,
    OneDevicePlacement,
    ParameterDevicePlacement,
    PlainVariable,
    SyncOnReadVariable,
    VariablePlacement,
    VariableRequest,
)

__all__ = [
    "AggregatingVariable",
    "CompilingExecutor",
    "EagerExecutor",
    "Executor",
    "MirroredPlacement",
    "MirroredVariable",
    "OneDevicePlacement",
    "ParameterDevicePlacement",
    "PlainVariable",
    "SyncOnReadVariable",
    "Topology",
    "VariablePlacement",
    "VariableRequest",
]
