"""The collectives of replicas: one interface, with an implementation for each execution."""

from replicax.collectives._across_arrays import AcrossArrays
from replicax.collectives._cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    require_cross_device_ops,
)
from replicax.collectives._dispatch import dispatch, is_awaited
from replicax.collectives._first_workers import first_workers
from replicax.collectives._in_program import InProgram
from replicax.collectives._interface import Collectives, require_numeric
from replicax.collectives._options import (
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
    Hints,
    merge_options,
)
from replicax.collectives._packing import PackRules, in_packs, packed
from replicax.collectives._reductions import reduction_of
from replicax.collectives._regroup import agree_on_unknown_shapes, regroup

__all__ = [
    "AcrossArrays",
    "CollectiveHints",
    "Collectives",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "Hints",
    "InProgram",
    "NcclAllReduce",
    "PackRules",
    "ReductionToOneDevice",
    "agree_on_unknown_shapes",
    "dispatch",
    "first_workers",
    "in_packs",
    "is_awaited",
    "merge_options",
    "packed",
    "reduction_of",
    "regroup",
    "require_cross_device_ops",
    "require_numeric",
]
