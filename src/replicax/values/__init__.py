"""Values with one component per replica, and the merging of replicas' results into one value."""

from replicax.values._components import (
    Component,
    regrouped_leaf,
    require_own_values,
    rows_of,
    select,
)
from replicax.values._device_put import as_plain, is_numeric, is_split, place
from replicax.values._distributed import DistributedValues, Shape
from replicax.values._first import first
from replicax.values._mirrored import Mirrored
from replicax.values._padding import largest_of
from replicax.values._per_replica import PerReplica, describe_each, describe_shapes

__all__ = [
    "Component",
    "DistributedValues",
    "Mirrored",
    "PerReplica",
    "Shape",
    "as_plain",
    "describe_each",
    "describe_shapes",
    "first",
    "is_numeric",
    "is_split",
    "largest_of",
    "place",
    "regrouped_leaf",
    "require_own_values",
    "rows_of",
    "select",
]
