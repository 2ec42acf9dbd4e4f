"""From the memory of the host to the replicas' devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.dtypes import canonicalize_dtype

from replicax._typing import Nest
from replicax.input._feed import Step
from replicax.topology import Topology
from replicax.values import PerReplica, is_numeric

_ALIGNMENT = 64  # of the memory that XLA uses on CPUs, in bytes


def to_devices(step: Step, topology: Topology) -> Nest:
    """The element of a step, with every replica's arrays on its device.

    The memory of the step is not used afterwards: a source may write its next element there.
    """
    devices = topology.local_devices
    numeric = [leaf for leaf, column in enumerate(step.columns) if is_numeric(column[0].dtype)]
    on_host = devices[0].platform == "cpu"
    own = _copied if on_host else _canonical
    if step.wholes is not None and len(devices) == topology.num_replicas > 1:
        # 20 us an array, where `device_put` takes 50, in a thread that competes with the step.
        wholes = [own(step.wholes[leaf]) for leaf in numeric]
        placed = [
            jax.make_array_from_callback(whole.shape, topology.split, whole.__getitem__)
            for whole in wholes
        ]
        values: list[Any] = [PerReplica.from_array(array, topology) for array in placed]
    else:
        placed = jax.device_put(
            [[own(array) for array in step.columns[leaf]] for leaf in numeric],
            [list(devices)] * len(numeric),
        )
        values = [_value(column, topology) for column in placed]
    if not on_host:
        jax.block_until_ready(placed)  # until then the memory of the step is being read
    arrays = dict(zip(numeric, values, strict=True))
    leaves = [
        arrays[leaf] if leaf in arrays else _on_host(column, topology)
        for leaf, column in enumerate(step.columns)
    ]
    return jax.tree.unflatten(step.structure, leaves)


def to_host(step: Step, topology: Topology) -> Nest:
    """The element of a step, as NumPy arrays."""
    return jax.tree.unflatten(
        step.structure, [_on_host(column, topology) for column in step.columns]
    )


def _on_host(column: list[np.ndarray], topology: Topology) -> Any:
    if is_numeric(column[0].dtype):
        column = [np.array(array, canonicalize_dtype(array.dtype)) for array in column]
    else:
        column = [array.copy() for array in column]
    return _value(column, topology)


def _value(components: list[Any], topology: Topology) -> Any:
    """With one replica, values are plain everywhere."""
    return components[0] if topology.num_replicas == 1 else PerReplica(components, topology)


def _copied(array: np.ndarray) -> np.ndarray:
    """A copy that becomes the memory of a device as it is.

    On CPUs, JAX 0.10.2 takes NumPy's memory over if it is aligned, with `may_alias=False` too, and
    the user's later writes would show in the element. Of memory that is not aligned it makes a copy
    in threads of its own, which takes twice as long as this one.
    """
    dtype = canonicalize_dtype(array.dtype)
    memory = np.empty(array.size * dtype.itemsize + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    copy = np.ndarray(array.shape, dtype, memory, start)
    copy[...] = array
    return copy


def _canonical(array: np.ndarray) -> np.ndarray:
    """In the dtype that JAX would make of it."""
    return np.asarray(array, canonicalize_dtype(array.dtype))
