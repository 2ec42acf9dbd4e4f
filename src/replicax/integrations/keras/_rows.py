"""Batches on the replicas' devices, with any number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype

from replicax._typing import Leaf
from replicax.collectives import agree_on_unknown_shapes
from replicax.input import aligned
from replicax.topology import Topology
from replicax.values import PerReplica, is_numeric


@jax.tree_util.register_dataclass  # because Keras puts prefetched batches on a device
@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a batch: an array with the same number of rows for each replica.

    Replicas with fewer rows are padded; `counts` has the number of real rows of each replica, or is
    None if all rows are real. A program removes the padding before it computes anything.
    """

    array: jax.Array
    counts: tuple[int, ...] | None = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        rows = len(self.array) if self.counts is None else sum(self.counts)
        return (rows, *self.array.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype


def is_rows(leaf: object) -> bool:
    return isinstance(leaf, Rows)


def rows_of(leaf: Leaf, topology: Topology) -> Leaf:
    """Divide a leaf of a batch over the replicas; return one without rows as is."""
    if is_rows(leaf) or np.ndim(leaf) == 0:
        return leaf
    replicas = topology.num_replicas
    count = leaf.shape[0]
    share = -(-count // replicas)
    counts = None if share * replicas == count else _shares(count, share, replicas)
    if isinstance(leaf, jax.Array) and topology.spans_processes:
        leaf = np.asarray(leaf)  # otherwise JAX would compare it across processes
    if isinstance(leaf, jax.Array):
        padding = [(0, share * replicas - count)] + [(0, 0)] * (leaf.ndim - 1)
        whole = leaf if counts is None else jnp.pad(leaf, padding)
        return Rows(jax.device_put(whole, topology.split), counts)
    if not is_numeric(leaf.dtype):
        return leaf
    # Copied, because the step may still be running when a generator reuses its array.
    shape = (share * replicas, *leaf.shape[1:])
    memory = aligned(shape, canonicalize_dtype(leaf.dtype))
    memory[:count], memory[count:] = leaf, 0
    array = jax.make_array_from_callback(shape, topology.split, memory.__getitem__)
    return Rows(array, counts)


def rows_of_element(value: object, topology: Topology) -> Any:
    """Divide a leaf of a distributed dataset's element, unless the dataset has done so already."""
    if not isinstance(value, PerReplica):
        return rows_of(value, topology)
    agree_on_unknown_shapes([value])
    if value.uniform:
        return Rows(value.array(topology))
    counts = tuple(shape[0] for shape in value.shapes)
    share = max(counts)
    padded = [
        jnp.pad(part, [(0, share - len(part))] + [(0, 0)] * (part.ndim - 1))
        for part in value.values
    ]
    shapes = [(share, *value.shapes[0][1:])] * len(counts)
    return Rows(PerReplica(padded, topology, shapes=shapes).array(topology), counts)


def cut(array: jax.Array, counts: Sequence[int] | None) -> jax.Array:
    """Return the rows without padding, in a program."""
    if counts is None:
        return array
    share = len(array) // len(counts)
    total = sum(counts)
    if tuple(counts) == _shares(total, share, len(counts)):
        return array[:total]  # they are contiguous, so nothing needs to be moved
    parts = [array[i * share : i * share + count] for i, count in enumerate(counts)]
    return jnp.concatenate(parts)


def _shares(total: int, share: int, replicas: int) -> tuple[int, ...]:
    """Return the number of rows of each replica when shares are filled in replica order."""
    return tuple(min(share, max(0, total - share * replica)) for replica in range(replicas))
