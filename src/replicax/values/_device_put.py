"""The placement of arrays: bringing them to a replica's devices, and assembling them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from replicax import _context
from replicax._jax_compat import uncommitted
from replicax.topology import REPLICA_AXIS, DeviceOrSharding, Topology


def place(value: Any, sharding: DeviceOrSharding) -> jax.Array:
    """Return `value` as an array on these devices; unchanged if it is on them, however divided.

    While a program is being traced, nothing is moved: placement is up to XLA.
    """
    if isinstance(value, Tracer) or _context.current().program is not None:
        return value
    if isinstance(value, jax.Array) and is_at(value, sharding):
        return value
    return jax.device_put(value, sharding)


def as_plain(array: jax.Array, topology: Topology) -> jax.Array:
    """Return the first replica's copy of a result as an array that JAX moves to where it is used.

    It can then be combined with the arrays of every replica that closes over it.
    """
    alone = topology.num_replicas == 1
    if isinstance(array, Tracer) or (alone and topology.logical_devices_per_replica > 1):
        return array
    first = array.addressable_data(0) if array.is_fully_replicated else array
    return first if alone else uncommitted(first)


def is_split(value: object, topology: Topology) -> bool:
    """Tell whether an array is laid out by rows over the replicas, one equal part for each."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, Tracer)
        and value.ndim > 0
        and value.sharding.num_devices > 1
        and not value.is_fully_replicated
        and value.sharding.is_equivalent_to(topology.split, value.ndim)
    )


def is_at(array: jax.Array, sharding: DeviceOrSharding) -> bool:
    """Tell whether an array is on all devices of a replica, and only there."""
    return array.devices() == (
        {sharding} if isinstance(sharding, jax.Device) else sharding.device_set
    )


def assembled(
    shape: tuple[int, ...], sharding: Any, components: Sequence[Any], topology: Topology
) -> jax.Array:
    """Assemble one array from the replicas' parts, immediately even while tracing."""
    with jax.ensure_compile_time_eval():
        placed = [
            component if _is_laid_out(component, own) else jax.device_put(component, own)
            for component, own in zip(components, _local_shardings(sharding, topology), strict=True)
        ]
        if topology.logical_devices_per_replica > 1:
            placed = [shard.data for array in placed for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def _is_laid_out(value: object, sharding: DeviceOrSharding) -> bool:
    if not isinstance(value, jax.Array):
        return False
    if isinstance(sharding, jax.Device):
        return value.devices() == {sharding}
    return value.sharding.is_equivalent_to(sharding, value.ndim)


def without_replicas(axes: object) -> object:
    """Return an entry of a `PartitionSpec` without the axis of the replicas."""
    if isinstance(axes, tuple):
        return tuple(axis for axis in axes if axis != REPLICA_AXIS) or None
    return None if axes == REPLICA_AXIS else axes


def _local_shardings(sharding: NamedSharding, topology: Topology) -> Sequence[DeviceOrSharding]:
    """Return the sharding of each local replica's part of a global array."""
    if topology.logical_devices_per_replica == 1:
        return topology.local_devices
    spec = PartitionSpec(*map(without_replicas, sharding.spec))
    return topology.local_shardings_by(spec)


def is_numeric(dtype: np.dtype) -> bool:
    """Tell whether JAX has arrays of this type; it has none of strings, dates and objects."""
    return dtype.kind not in "OSUMm" and dtype.names is None
