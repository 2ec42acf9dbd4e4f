"""What replicas do together: one interface, an implementation for each execution."""

from replicax.collectives._across_arrays import AcrossArrays
from replicax.collectives._cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    require_cross_device_ops,
)
from replicax.collectives._dispatch import is_awaited, launch
from replicax.collectives._in_program import InProgram
from replicax.collectives._interface import Collectives, require_numeric
from replicax.collectives._options import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
    merge_options,
)

__all__ = [
    "AcrossArrays",
    "CollectiveHints",
    "Collectives",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "InProgram",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "is_awaited",
    "launch",
    "merge_options",
    "require_cross_device_ops",
    "require_numeric",
]
