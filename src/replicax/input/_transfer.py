"""The transfer from host memory to the replicas' devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from replicax._typing import Nest
from replicax.input._feed import Step
from replicax.input._memory import own_copy
from replicax.topology import Topology
from replicax.values import PerReplica, is_numeric


def owned(step: Step) -> Step:
    """Return the same step, with arrays in memory of its own."""
    if not step.owned:
        if step.wholes is not None:
            step.wholes = [own_copy(whole) for whole in step.wholes]
        step.parts = [[own_copy(array) for array in column] for column in step.parts]
        step.owned = True
    return step


def to_devices(step: Step, topology: Topology) -> Nest:
    """Return the element of a step, with every replica's arrays on its device."""
    wholes = owned(step).wholes
    if wholes is not None and step.replicas == topology.num_replicas > 1:
        leaves = [_split(whole, topology) for whole in wholes]
    else:
        columns = step.columns()
        numeric = [leaf for leaf, column in enumerate(columns) if is_numeric(column[0].dtype)]
        shardings = list(topology.local_shardings)
        placed = jax.device_put([columns[leaf] for leaf in numeric], [shardings] * len(numeric))
        for leaf, column in zip(numeric, placed, strict=True):
            columns[leaf] = column
        leaves = _values(columns, step, topology)
    return jax.tree.unflatten(step.structure, leaves)


def to_host(step: Step, topology: Topology) -> Nest:
    """Return the element of a step, as NumPy arrays."""
    columns = owned(step).columns()
    return jax.tree.unflatten(step.structure, _values(columns, step, topology))


def _split(whole: np.ndarray, topology: Topology) -> PerReplica:
    if not is_numeric(whole.dtype):
        return PerReplica(np.split(whole, topology.num_replicas), topology)
    # This takes 20 us per array, and `device_put` 50, in a thread that competes with the step.
    array = jax.make_array_from_callback(whole.shape, topology.split, whole.__getitem__)
    return PerReplica.from_array(array, topology)


def _values(columns: list[list[Any]], step: Step, topology: Topology) -> list[Any]:
    """Return the value of all replicas for each leaf; with one replica, a plain array."""
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
