"""Which devices form which replica, as a value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from replicax._typing import DeviceLike
from replicax.errors import DeviceError
from replicax.topology._devices import resolve_devices

REPLICA_AXIS = "replica"


@dataclass(frozen=True)
class Topology:
    """The devices of every replica of every worker: `devices[replica][logical device]`.

    >>> import replicax as rx
    >>> cpus = ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    >>> topology = rx.Topology.of(cpus, logical_devices_per_replica=2)
    >>> topology.num_replicas, topology.mesh.axis_names
    (2, ('replica', 'logical_0'))
    """

    devices: tuple[tuple[jax.Device, ...], ...]

    def __hash__(self) -> int:
        return self._hash  # kept: every call of a compiled function asks for it

    @cached_property
    def _hash(self) -> int:
        return hash(self.devices)

    def __post_init__(self) -> None:
        if not self.devices or not self.devices[0]:
            raise DeviceError("A strategy needs at least one device; none was given.")
        if len({len(replica) for replica in self.devices}) > 1:
            raise DeviceError(
                "Every replica needs the same number of logical devices; got "
                f"{[len(replica) for replica in self.devices]}."
            )
        everything = [device for replica in self.devices for device in replica]
        repeated = sorted({str(d) for d in everything if everything.count(d) > 1})
        if repeated:
            raise DeviceError(
                f"Every device can be used once; given more than once: {', '.join(repeated)}."
            )

    @classmethod
    def of(cls, devices: Iterable[DeviceLike], *, logical_devices_per_replica: int = 1) -> Topology:
        """Consecutive groups of `logical_devices_per_replica` devices, one group a replica."""
        flat = resolve_devices(devices)
        size = logical_devices_per_replica
        if size < 1 or len(flat) % size:
            raise DeviceError(
                f"{len(flat)} device(s) cannot be divided into replicas of {size} logical devices."
            )
        return cls(tuple(flat[start : start + size] for start in range(0, len(flat), size)))

    @property
    def num_replicas(self) -> int:
        return len(self.devices)

    @property
    def logical_devices_per_replica(self) -> int:
        return len(self.devices[0])

    @cached_property
    def local_replicas(self) -> tuple[int, ...]:
        """The ids of the replicas whose devices belong to this process."""
        here = jax.process_index()
        return tuple(
            i for i, replica in enumerate(self.devices) if replica[0].process_index == here
        )

    @cached_property
    def local_devices(self) -> tuple[jax.Device, ...]:
        """The first logical device of each local replica."""
        return tuple(self.devices[i][0] for i in self.local_replicas)

    @cached_property
    def spans_processes(self) -> bool:
        """Whether some of the replicas belong to other processes."""
        return len(self.local_replicas) < self.num_replicas

    @cached_property
    def mesh(self) -> Mesh:
        """All devices as a mesh: a replica axis, and a logical axis for each prime factor.

        Prime axes, so that any way to partition a tensor over the logical devices can be
        expressed by grouping axes.
        """
        factors = _prime_factors(self.logical_devices_per_replica)
        grid = np.array(self.devices, dtype=object).reshape(self.num_replicas, *factors)
        names = (REPLICA_AXIS, *(f"logical_{i}" for i in range(len(factors))))
        return Mesh(grid, names, axis_types=(AxisType.Auto,) * grid.ndim)

    @cached_property
    def replicated(self) -> NamedSharding:
        """The same value on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def split(self) -> NamedSharding:
        """The first dimension divided over the replicas."""
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))

    def replicate(self, value: Any) -> jax.Array:
        """`value` on every device of the topology; the same one in every process."""
        if not self.spans_processes or isinstance(value, Tracer):
            return jax.device_put(value, self.replicated)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            if value.sharding == self.replicated:
                return value
            value = value.addressable_data(0)
        # Each process brings its own copies. `device_put` would compare the values of all
        # processes first, in a collective of its own.
        copies = jax.device_put([value] * len(self.local_devices), list(self.local_devices))
        return jax.make_array_from_single_device_arrays(copies[0].shape, self.replicated, copies)

    def __str__(self) -> str:
        kind = self.devices[0][0].platform.upper()
        return f"{self.num_replicas} x {self.logical_devices_per_replica} {kind}"


def _prime_factors(number: int) -> tuple[int, ...]:
    factors: list[int] = []
    for candidate in range(2, math.isqrt(number) + 1):
        while number % candidate == 0:
            factors.append(candidate)
            number //= candidate
    return (*factors, number) if number > 1 else tuple(factors)
