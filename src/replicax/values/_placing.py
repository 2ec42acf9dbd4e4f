"""Where arrays are: bringing them to a replica's devices, and putting them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from replicax import _context
from replicax._jax_compat import uncommitted
from replicax.topology import REPLICA_AXIS, Home, Topology


def place(value: Any, home: Home) -> jax.Array:
    """`value` as an array at `home`; the array itself when it is there already, also in parts.

    While a program is traced nothing is moved: where things are is XLA's business there.
    """
    if isinstance(value, Tracer) or _context.current().program is not None:
        return value
    if isinstance(value, jax.Array) and is_at(value, home):
        return value
    return jax.device_put(value, home)


def as_plain(array: jax.Array, topology: Topology) -> jax.Array:
    """Return the first replica's copy of a result as an array that JAX moves to where it is used.

    So it meets the arrays of every replica that closes over it.
    """
    alone = topology.num_replicas == 1
    if isinstance(array, Tracer) or (alone and topology.logical_devices_per_replica > 1):
        return array
    first = array.addressable_data(0) if array.is_fully_replicated else array
    return first if alone else uncommitted(first)


def is_split(value: Any, topology: Topology) -> bool:
    """Tell whether an array is laid out by rows over the replicas, one equal part for each."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, Tracer)
        and value.ndim > 0
        and value.sharding.num_devices > 1
        and not value.is_fully_replicated
        and value.sharding.is_equivalent_to(topology.split, value.ndim)
    )


def is_at(array: jax.Array, home: Home) -> bool:
    """Whether an array is on all devices of a replica, and only there."""
    return array.devices() == ({home} if isinstance(home, jax.Device) else home.device_set)


def assembled(
    shape: tuple[int, ...], sharding: Any, components: Sequence[Any], topology: Topology
) -> jax.Array:
    """One array of what is on, or goes to, each replica's device; now, also while tracing."""
    with jax.ensure_compile_time_eval():
        placed = [
            component if _is_laid_out(component, home) else jax.device_put(component, home)
            for component, home in zip(components, _homes(sharding, topology), strict=True)
        ]
        if topology.logical_devices_per_replica > 1:
            placed = [shard.data for array in placed for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def _is_laid_out(value: Any, home: Home) -> bool:
    if not isinstance(value, jax.Array):
        return False
    if isinstance(home, jax.Device):
        return value.devices() == {home}
    return value.sharding.is_equivalent_to(home, value.ndim)


def without_replicas(axes: Any) -> Any:
    """An entry of a layout, on the devices of one replica."""
    if isinstance(axes, tuple):
        return tuple(axis for axis in axes if axis != REPLICA_AXIS) or None
    return None if axes == REPLICA_AXIS else axes


def _homes(sharding: NamedSharding, topology: Topology) -> Sequence[Home]:
    """Where each local replica's part of a global array of that sharding has to be."""
    if topology.logical_devices_per_replica == 1:
        return topology.local_devices
    spec = PartitionSpec(*map(without_replicas, sharding.spec))
    return topology.divided_homes(spec)


def is_numeric(dtype: np.dtype) -> bool:
    """Whether JAX has arrays of it; not so of strings, dates and objects."""
    return dtype.kind not in "OSUMm" and dtype.names is None
