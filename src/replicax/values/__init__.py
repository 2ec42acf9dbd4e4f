"""Values with one component a replica, and how the results of replicas become one value."""

from replicax.values._distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    Shape,
    as_plain,
    describe_shapes,
    is_numeric,
    place,
    settle_shapes,
)
from replicax.values._regroup import Component, regroup, require_home, select

__all__ = [
    "Component",
    "DistributedValues",
    "Mirrored",
    "PerReplica",
    "Shape",
    "as_plain",
    "describe_shapes",
    "is_numeric",
    "place",
    "regroup",
    "require_home",
    "select",
    "settle_shapes",
]
