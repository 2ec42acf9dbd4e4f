"""Taking the arguments of replicas apart, and putting their results side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from replicax import _nest
from replicax._typing import Leaf, Nest
from replicax.errors import ForeignValue, StructureMismatch
from replicax.topology import Topology
from replicax.values._device_put import place
from replicax.values._distributed import DistributedValues
from replicax.values._mirrored import Mirrored
from replicax.values._per_replica import PerReplica


class Component:
    """The base of one replica's part of a larger object, such as a copy of a variable."""

    __slots__ = ()

    @property
    def container(self) -> Any:
        raise NotImplementedError


def rows_of(
    nests: Sequence[Nest], *, keep_opaque: bool = False
) -> tuple[list[tuple[Any, ...]], Any]:
    """Return the replicas' leaves at each position of their nests, and the structure."""
    leaves, structure = _nest.flatten(nests[0], keep_opaque=keep_opaque)
    columns = [leaves]
    for replica, nest in enumerate(nests[1:], start=1):
        others, other_structure = _nest.flatten(nest, keep_opaque=keep_opaque)
        if other_structure != structure:
            raise StructureMismatch(
                "The replicas produced different structures. "
                f"replica 0: {structure}; replica {replica}: {other_structure}. "
                "Return the same nest from every replica."
            )
        columns.append(others)
    return list(zip(*columns, strict=True)), structure


def regrouped_leaf(
    row: Sequence[object], topology: Topology, wrap: type[PerReplica] | type[Mirrored]
) -> object:
    """Return the merged value of the replicas' leaves at one position, as this worker knows it."""
    first = row[0]
    if isinstance(first, Component):
        container = first.container
        if all(isinstance(other, Component) and other.container is container for other in row):
            return container
    # Local replicas may share one array, but other workers have arrays of their own.
    apart = topology.spans_processes and isinstance(first, (jax.Array, np.ndarray, np.generic))
    if not apart and all(other is first for other in row):
        return first
    return wrap(row, topology)


def select(nest: Nest, index: int, topology: Topology, *, keep_opaque: bool = False) -> Nest:
    """Return `nest` with the components of its values for local replica `index`.

    Plain arrays are brought to the replica's device, since JAX does not mix devices.
    `keep_opaque` is for arguments of functions: arrays that JAX moves itself stay where they are.
    """
    sharding = topology.local_shardings[index]

    def component(leaf: object) -> Leaf:
        if isinstance(leaf, DistributedValues):
            return leaf.component(index)
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            return leaf
        return leaf if keep_opaque and not leaf.committed else place(leaf, sharding)

    return _nest.transform(component, nest, keep_opaque=keep_opaque)


def require_own_values(nest: Nest, topology: Topology, method: str) -> None:
    """Refuse distributed values of another strategy."""
    for leaf in _nest.leaves(nest, keep_opaque=True):
        if not isinstance(leaf, DistributedValues):
            continue
        own = leaf.topology
        if (own is not None and own is not topology and own != topology) or (
            own is None and len(leaf.values) != len(topology.local_replicas)
        ):
            raise ForeignValue(
                f"`{method}` got a {type(leaf).__name__} with {len(leaf.values)} component(s) that "
                f"belongs to another strategy; this one runs on {topology}. Take it apart with "
                "that strategy's `experimental_local_results`, and distribute it again with "
                "`experimental_distribute_values_from_function`."
            )
