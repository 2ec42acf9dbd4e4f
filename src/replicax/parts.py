"""What strategies are made of, for those who make their own."""

from replicax.execution import EagerExecutor, Executor
from replicax.topology import Topology
from replicax.variables import (
    MirroredPlacement,
    OneDevicePlacement,
    ParameterDevicePlacement,
    VariablePlacement,
    VariableRequest,
)

__all__ = [
    "EagerExecutor",
    "Executor",
    "MirroredPlacement",
    "OneDevicePlacement",
    "ParameterDevicePlacement",
    "Topology",
    "VariablePlacement",
    "VariableRequest",
]
