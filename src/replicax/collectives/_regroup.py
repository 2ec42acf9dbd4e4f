"""The agreements of workers on per-replica values, which never communicate by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from replicax import _context, cluster
from replicax._typing import Nest
from replicax.errors import InvalidType, ShapeMismatch
from replicax.topology import Topology
from replicax.values import (
    Mirrored,
    PerReplica,
    describe_each,
    describe_shapes,
    regrouped_leaf,
    rows_of,
)


def agree_on_shapes(
    values: Sequence[PerReplica], label: str, numbers: list[str] | None = None
) -> list[list[str] | None]:
    """Make the shapes of per-replica values known, if workers have made the values by themselves.

    If there are several workers, they all come here before they combine values for `label`, and get
    an error if they come for different things or with different dtypes. They may bring their
    `numbers` along; those of all workers are returned if an exchange took place.
    """
    topology = values[0].topology if values else None
    if topology is None or not topology.spans_processes:
        return []
    if _context.current().program is not None:
        return []  # Workers have made sure that the program is the same on all of them.
    own = [value.local_kinds() for value in values]
    brought = cluster.current().all_gather(f"{label} of {len(values)} value(s)", [own, numbers])
    for number, value in enumerate(values):
        parts = [part for worker, _ in brought for part in worker[number]]
        dtypes = [dtype for _, dtype in parts]
        if len(set(dtypes)) > 1:
            raise InvalidType(
                f"`{label}` needs one dtype on all replicas; got {describe_each(dtypes)}."
            )
        shapes = tuple(tuple(shape) for shape, _ in parts)
        if value.known_shapes() not in (None, shapes):
            raise ShapeMismatch(
                f"`{label}` got values that are not the same on all workers: "
                f"{describe_shapes(shapes)}. Give all workers the result of the same computation."
            )
        value.learn_shapes(shapes)
    return [numbers for _, numbers in brought]


def agree_on_unknown_shapes(values: Sequence[PerReplica]) -> None:
    """Learn the shapes of those values whose shapes are unknown here, and exchange only those."""
    unknown = [value for value in values if not value.has_known_shapes]
    agree_on_shapes(unknown, "comparing the shapes of per-replica values")


def regroup(
    nests: Sequence[Nest],
    topology: Topology,
    *,
    wrap: type[PerReplica] | type[Mirrored] = PerReplica,
    always_wrap: bool = False,
    keep_opaque: bool = False,
) -> Nest:
    """Regroup one nest per replica into one nest; several workers compare the numbers in it.

    For each leaf: an object that is the same everywhere stays that object; the copies of one
    variable become that variable; anything else becomes a `wrap`. With `always_wrap`, every leaf
    does, even if the leaves are equal or there is only one replica. `keep_opaque` is for the
    results of functions.
    """
    rows, structure = rows_of(nests, keep_opaque=keep_opaque)
    if always_wrap:
        return jax.tree.unflatten(structure, [wrap(row, topology) for row in rows])
    merged = [regrouped_leaf(row, topology, wrap) for row in rows]
    if topology.spans_processes:
        _compare_numbers(rows, merged, topology, wrap)
    return jax.tree.unflatten(structure, merged)


def _compare_numbers(
    rows: Sequence[Sequence[object]],
    merged: list[Any],
    topology: Topology,
    wrap: type[PerReplica] | type[Mirrored],
) -> None:
    """Keep a Python number as one only if the replicas of all workers have the same.

    Only the type of a leaf decides whether it is compared, so that all workers take part.
    """
    places = [
        index for index, row in enumerate(rows) if isinstance(row[0], (bool, int, float, complex))
    ]
    if not places:
        return
    own = [repr(merged[index]) for index in places]
    everyones = cluster.current().all_gather(f"comparing {len(own)} numbers of replicas", own)
    for index, texts in zip(places, zip(*everyones, strict=True), strict=True):
        if len(set(texts)) > 1:
            merged[index] = wrap(rows[index], topology)
