"""The assignment of devices to replicas, as a value."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from replicax._typing import DeviceLike
from replicax.errors import DeviceError, InvalidArgument, InvalidType
from replicax.topology._devices import resolve_devices

REPLICA_AXIS = "replica"
# The arrays of a replica are on its device or, if it has several, over a mesh of them.
DeviceOrSharding = jax.Device | NamedSharding


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
        return self._hash  # cached, because every call of a compiled function needs it

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
        """Group consecutive devices, `logical_devices_per_replica` of them per replica."""
        flat = resolve_devices(devices)
        size = logical_devices_per_replica
        if _whole_numbers([size]) is None:
            raise InvalidType(
                f"`logical_devices_per_replica` must be a positive whole number; got {size!r}."
            )
        if len(flat) % size:
            raise DeviceError(
                f"{len(flat)} device(s) cannot be divided into replicas of {size} logical devices."
            )
        groups = tuple(flat[start : start + size] for start in range(0, len(flat), size))
        for number, replica in enumerate(groups):
            if len({device.process_index for device in replica}) > 1:
                raise DeviceError(
                    "The logical devices of a replica belong to one process; those of replica "
                    f"{number} are of several: {', '.join(map(str, replica))}."
                )
        return cls(groups)

    @property
    def num_replicas(self) -> int:
        return len(self.devices)

    @property
    def logical_devices_per_replica(self) -> int:
        return len(self.devices[0])

    @cached_property
    def on_cpus(self) -> bool:
        """True if the devices are CPUs, for which XLA has limits of its own."""
        return self.devices[0][0].platform == "cpu"

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
    def local_shardings(self) -> tuple[DeviceOrSharding, ...]:
        """The sharding of each local replica: its device, or copies on all of its devices."""
        if self.logical_devices_per_replica == 1:
            return self.local_devices
        return self.local_shardings_by(PartitionSpec())

    def local_sharding_of(self, device: jax.Device) -> DeviceOrSharding:
        """Return the sharding of the replica whose first device this is, otherwise the device."""
        shardings = dict(zip(self.local_devices, self.local_shardings, strict=True))
        return shardings.get(device, device)

    def local_shardings_by(self, spec: PartitionSpec) -> tuple[NamedSharding, ...]:
        """Return the shardings of replicas with several devices, for arrays divided by `spec`."""
        return tuple(NamedSharding(mesh, spec) for mesh in self._local_meshes)

    def is_local_sharding(self, sharding: NamedSharding) -> bool:
        """Return whether a sharding is over the logical devices of one local replica."""
        return sharding.mesh in self._local_meshes and self.logical_devices_per_replica > 1

    @cached_property
    def _local_meshes(self) -> tuple[Mesh, ...]:
        """The logical devices of each local replica."""
        names, grid = self.mesh.axis_names[1:], self.mesh.devices
        types = (AxisType.Auto,) * len(names)
        return tuple(Mesh(grid[i], names, axis_types=types) for i in self.local_replicas)

    @cached_property
    def spans_processes(self) -> bool:
        """True if some of the replicas belong to other processes."""
        return len(self.local_replicas) < self.num_replicas

    @cached_property
    def scatters_sums(self) -> bool:
        """True if reduce-scatters are right.

        Between processes on CPUs they are Gloo's, and jaxlib 0.10.1 gets some of them wrong: of 20
        sums of 16 MiB over two processes, one had wrong elements. Its all-reduces are right.
        """
        return not (self.spans_processes and self.on_cpus)

    @cached_property
    def mesh(self) -> Mesh:
        """All devices as a mesh: a replica axis, and a logical axis for each prime factor.

        Axes are prime, so that any way to partition a tensor over the logical devices can be
        expressed by grouping axes.
        """
        factors = _prime_factors(self.logical_devices_per_replica)
        grid = np.array(self.devices, dtype=object).reshape(self.num_replicas, *factors)
        names = (REPLICA_AXIS, *(f"logical_{i}" for i in range(len(factors))))
        return Mesh(grid, names, axis_types=(AxisType.Auto,) * grid.ndim)

    @cached_property
    def replicated(self) -> NamedSharding:
        """The sharding with the same value on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @cached_property
    def split(self) -> NamedSharding:
        """The sharding with the first dimension divided over the replicas."""
        return NamedSharding(self.mesh, PartitionSpec(REPLICA_AXIS))

    def partition(self, dimensions: Sequence[int], shape: Sequence[int]) -> PartitionSpec:
        """Return the spec that divides an array of `shape` over the logical devices of a replica.

        Dimension i is divided into `dimensions[i]` parts; there is one part for each device.
        """
        parts = self.checked_partition(dimensions)
        if len(parts) != len(shape):
            raise InvalidArgument(
                f"`partition_dimensions` must have one number for each dimension; got "
                f"{list(parts)} for a tensor of shape {tuple(shape)}."
            )
        for size, part in zip(shape, parts, strict=True):
            if size % part:
                raise InvalidArgument(
                    f"A tensor of shape {tuple(shape)} cannot be divided by `partition_dimensions` "
                    f"{list(parts)}: {size} is not divisible by {part}."
                )
        free = [(name, size) for name, size in self.mesh.shape.items() if name != REPLICA_AXIS]
        axes: list[tuple[str, ...] | None] = []
        for part in parts:
            taken: list[str] = []
            for name, size in list(free):
                if part % size == 0:  # axes have prime sizes, so no choice is wrong
                    taken.append(name)
                    free.remove((name, size))
                    part //= size
            axes.append(tuple(taken) or None)
        return PartitionSpec(*axes)

    def checked_partition(self, dimensions: object) -> tuple[int, ...]:
        """Return `partition_dimensions`, checked to be one part per logical device of a replica."""
        parts, count = _whole_numbers(dimensions), self.logical_devices_per_replica
        if parts is None:
            raise InvalidType(
                "`partition_dimensions` are positive whole numbers, one for each dimension; got "
                f"{dimensions!r}."
            )
        if math.prod(parts) != count:
            raise InvalidArgument(
                f"The product of `partition_dimensions` must be the number of logical devices of "
                f"a replica, which is {count}; got {list(parts)}."
            )
        return parts

    def replicate(self, value: object) -> jax.Array:
        """Put `value`, which is the same in every process, on every device of the topology."""
        if not self.spans_processes or isinstance(value, Tracer):
            return jax.device_put(value, self.replicated)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            if value.sharding.is_equivalent_to(self.replicated, value.ndim):
                return value
            if not value.is_fully_replicated:
                with jax.disable_jit(False):  # this is not the user's computation
                    return jax.jit(_itself, out_shardings=self.replicated)(value)
            value = value.addressable_data(0)
        # Each process brings its own copies. `device_put` would first compare the values of all
        # processes, in a collective of its own.
        devices = [device for replica in self.local_replicas for device in self.devices[replica]]
        copies = jax.device_put([value] * len(devices), devices)
        return jax.make_array_from_single_device_arrays(copies[0].shape, self.replicated, copies)

    def lay_out(self, value: object, spec: PartitionSpec) -> jax.Array:
        """Put `value` on all devices, divided over the logical devices of each replica."""
        sharding = NamedSharding(self.mesh, spec)
        if isinstance(value, Tracer):
            return jax.lax.with_sharding_constraint(value, sharding)
        if isinstance(value, jax.Array) and value.sharding.is_equivalent_to(sharding, value.ndim):
            return value
        if not self.spans_processes:
            return jax.device_put(value, sharding)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            with jax.disable_jit(False):
                return jax.jit(_itself, out_shardings=sharding)(value)
        own = np.asarray(value)
        return jax.make_array_from_callback(own.shape, sharding, lambda index: own[index])

    def __str__(self) -> str:
        kind = self.devices[0][0].platform.upper()
        return f"{self.num_replicas} x {self.logical_devices_per_replica} {kind}"


def _itself(array: jax.Array) -> jax.Array:
    return array


def _whole_numbers(numbers: Any) -> tuple[int, ...] | None:
    """Return positive whole numbers, or None if `numbers` are anything else."""
    try:
        found = tuple(operator.index(number) for number in numbers)
    except TypeError:
        return None
    return found if all(number > 0 for number in found) else None


def _prime_factors(number: int) -> tuple[int, ...]:
    factors: list[int] = []
    for candidate in range(2, math.isqrt(number) + 1):
        while number % candidate == 0:
            factors.append(candidate)
            number //= candidate
    return (*factors, number) if number > 1 else tuple(factors)
