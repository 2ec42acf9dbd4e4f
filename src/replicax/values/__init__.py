"""Values with one component per replica, and how the results of replicas become one value."""

from replicax.values._distributed import DistributedValues, Shape
from replicax.values._first import first
from replicax.values._mirrored import Mirrored
from replicax.values._padding import largest_of
from replicax.values._per_replica import PerReplica, describe_shapes, settle_shapes
from replicax.values._placing import as_plain, is_numeric, is_split, place
from replicax.values._regroup import Component, regroup, require_home, select

__all__ = [
    "Component",
    "DistributedValues",
    "Mirrored",
    "PerReplica",
    "Shape",
    "as_plain",
    "describe_shapes",
    "first",
    "is_numeric",
    "is_split",
    "largest_of",
    "place",
    "regroup",
    "require_home",
    "select",
    "settle_shapes",
]
