"""From the memory of the host to the replicas' devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.dtypes import canonicalize_dtype

from replicax._typing import Nest
from replicax.input._feed import Step
from replicax.input._memory import aligned, is_private
from replicax.topology import Topology
from replicax.values import PerReplica, is_numeric


def owned(step: Step) -> Step:
    """The same step, in memory of its own."""
    if not step.owned:
        if step.wholes is not None:
            step.wholes = [_copied(whole) for whole in step.wholes]
        step.parts = [[_copied(array) for array in column] for column in step.parts]
        step.owned = True
    return step


def to_devices(step: Step, topology: Topology) -> Nest:
    """The element of a step, with every replica's arrays on its device."""
    wholes = owned(step).wholes
    if wholes is not None and step.replicas == topology.num_replicas > 1:
        leaves = [_split(whole, topology) for whole in wholes]
    else:
        columns = step.columns()
        numeric = [leaf for leaf, column in enumerate(columns) if is_numeric(column[0].dtype)]
        homes = list(topology.local_homes)
        placed = jax.device_put([columns[leaf] for leaf in numeric], [homes] * len(numeric))
        for leaf, column in zip(numeric, placed, strict=True):
            columns[leaf] = column
        leaves = _values(columns, step, topology)
    return jax.tree.unflatten(step.structure, leaves)


def to_host(step: Step, topology: Topology) -> Nest:
    """The element of a step, as NumPy arrays."""
    columns = owned(step).columns()
    return jax.tree.unflatten(step.structure, _values(columns, step, topology))


def _split(whole: np.ndarray, topology: Topology) -> PerReplica:
    if not is_numeric(whole.dtype):
        return PerReplica(np.split(whole, topology.num_replicas), topology)
    # 20 us an array, where `device_put` takes 50, in a thread that competes with the step.
    array = jax.make_array_from_callback(whole.shape, topology.split, whole.__getitem__)
    return PerReplica.from_array(array, topology)


def _values(columns: list[list[Any]], step: Step, topology: Topology) -> list[Any]:
    """For each leaf, the value of all replicas; with one replica, values are plain everywhere."""
    if topology.num_replicas == 1:
        return [column[0] for column in columns]
    shapes = step.shapes or [None] * len(columns)
    values = [
        PerReplica(column, topology, shapes=known)
        for column, known in zip(columns, shapes, strict=True)
    ]
    for value in values:
        if topology.spans_processes and isinstance(value.primary, jax.Array) and value.uniform:
            value.array(topology)  # now, ahead of the step
    return values


def _copied(array: np.ndarray) -> np.ndarray:
    """The array in memory that nobody else writes, in the dtype that JAX would make of it.

    On CPUs, JAX 0.10.2 takes NumPy's memory over if it is aligned, with `may_alias=False` too, and
    the user's later writes would show in the element. Of memory that is not aligned it makes a copy
    in threads of its own, which takes twice as long as this one.
    """
    if not is_numeric(array.dtype):
        return array.copy()
    dtype = canonicalize_dtype(array.dtype)
    if dtype == array.dtype and is_private(array):
        return array
    copy = aligned(array.shape, dtype)
    copy[...] = array
    return copy
