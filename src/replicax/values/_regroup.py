"""What replicas return becomes one value; what they are given is taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from replicax import _nest, cluster
from replicax._typing import Nest
from replicax.errors import ForeignValue, StructureMismatch
from replicax.topology import Topology
from replicax.values._distributed import DistributedValues
from replicax.values._mirrored import Mirrored
from replicax.values._per_replica import PerReplica
from replicax.values._placing import place


class Component:
    """Base of what is one replica's part of a larger object, such as a copy of a variable."""

    __slots__ = ()

    @property
    def container(self) -> Any:
        raise NotImplementedError


def regroup(
    nests: Sequence[Nest],
    topology: Topology,
    *,
    wrap: type[PerReplica] | type[Mirrored] = PerReplica,
    always_wrap: bool = False,
    handed: bool = False,
) -> Nest:
    """Merges one nest a replica into one nest.

    For each leaf: the same object everywhere stays that object; the copies of one variable become
    that variable; anything else becomes a `wrap`. `always_wrap` makes one of every leaf, also of
    equal ones and with one replica. `handed` is for what functions return.
    """
    leaves, structure = _nest.flatten(nests[0], handed=handed)
    columns = [leaves]
    for replica, nest in enumerate(nests[1:], start=1):
        others, other_structure = _nest.flatten(nest, handed=handed)
        if other_structure != structure:
            raise StructureMismatch(
                "The replicas produced different structures. "
                f"replica 0: {structure}; replica {replica}: {other_structure}. "
                "Return the same nest from every replica."
            )
        columns.append(others)
    rows = list(zip(*columns, strict=True))
    if always_wrap:
        return jax.tree.unflatten(structure, [wrap(row, topology) for row in rows])
    merged = [_merged_leaf(row, topology, wrap) for row in rows]
    if topology.spans_processes:
        _compare_numbers(rows, merged, topology, wrap)
    return jax.tree.unflatten(structure, merged)


def _merged_leaf(
    row: Sequence[Any], topology: Topology, wrap: type[PerReplica] | type[Mirrored]
) -> Any:
    first = row[0]
    if isinstance(first, Component):
        container = first.container
        if all(isinstance(other, Component) and other.container is container for other in row):
            return container
    # Of an array, other workers have their own.
    apart = topology.spans_processes and isinstance(first, (jax.Array, np.ndarray, np.generic))
    if not apart and all(other is first for other in row):
        return first
    return wrap(row, topology)


def _compare_numbers(
    rows: Sequence[Sequence[Any]],
    merged: list[Any],
    topology: Topology,
    wrap: type[PerReplica] | type[Mirrored],
) -> None:
    """A Python number stays one only if the replicas of all workers have it.

    Which leaves are looked at is a matter of their type, so that all workers come to compare them.
    """
    places = [
        index for index, row in enumerate(rows) if isinstance(row[0], (bool, int, float, complex))
    ]
    if not places:
        return
    own = [repr(merged[index]) for index in places]
    everyones = cluster.current().meet(f"comparing {len(own)} numbers of replicas", own)
    for index, texts in zip(places, zip(*everyones, strict=True), strict=True):
        if len(set(texts)) > 1:
            merged[index] = wrap(rows[index], topology)


def select(nest: Nest, index: int, topology: Topology, *, handed: bool = False) -> Nest:
    """The components that local replica `index` gets of the distributed values in `nest`.

    Plain arrays are brought to the replica's device, for JAX does not mix devices by itself.
    `handed` is for the arguments of functions, of which arrays that JAX moves stay as they are.
    """
    home = topology.local_homes[index]

    def component(leaf: Any) -> Any:
        if isinstance(leaf, DistributedValues):
            return leaf.component(index)
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            return leaf
        return leaf if handed and not leaf.committed else place(leaf, home)

    return _nest.transform(component, nest, handed=handed)


def require_home(nest: Nest, topology: Topology, method: str) -> None:
    """Refuses distributed values of another strategy."""
    for leaf in _nest.leaves(nest, handed=True):
        if not isinstance(leaf, DistributedValues):
            continue
        home = leaf.topology
        if (home is not None and home is not topology and home != topology) or (
            home is None and len(leaf.values) != len(topology.local_replicas)
        ):
            raise ForeignValue(
                f"`{method}` got a {type(leaf).__name__} with {len(leaf.values)} component(s) that "
                f"belongs to another strategy; this one runs on {topology}. Take it apart with "
                "that strategy's `experimental_local_results`, and distribute it again with "
                "`experimental_distribute_values_from_function`."
            )
