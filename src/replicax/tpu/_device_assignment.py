"""The assignment of TPU cores to replicas, as a value."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from typing import Any, final

import jax
import numpy as np

from replicax.errors import InvalidArgument, InvalidType
from replicax.tpu._integers import integers
from replicax.tpu._topology import Topology


class DeviceOrderMode(enum.IntEnum):
    """The order in which `DeviceAssignment.build` takes chips."""

    AUTO = 0
    """A ring where one is possible, otherwise a mesh."""
    RING = 1
    """Each chip is next to the one before it, and the last is next to the first."""
    MESH = 2
    """One row of chips after another."""


@final
class DeviceAssignment:
    """The assignment of cores to replicas; make it with `build`.

    Args:
      topology: Where the cores lie.
      core_assignment: The coordinates of the cores: an array of shape replicas x cores per replica
        x 4.

    >>> import jax
    >>> from replicax.tpu.experimental import DeviceAssignment, Topology
    >>> topology = Topology.of(jax.devices())  # eight virtual CPU devices
    >>> assignment = DeviceAssignment.build(topology, [1, 1, 1, 2], num_replicas=4)
    >>> assignment.num_replicas, assignment.num_cores_per_replica
    (4, 2)
    """

    __slots__ = ("_core_assignment", "_replicas_at", "_topology")

    def __init__(self, topology: Topology, core_assignment: Any) -> None:
        self._topology = _checked(topology)
        self._core_assignment = integers(
            "core_assignment",
            core_assignment,
            (None, None, topology.mesh_rank),
            "Give the coordinates of each core of each replica.",
        )
        seen: set[tuple[int, ...]] = set()
        self._replicas_at: dict[tuple[int, int], list[int]] = {}
        for replica, core in np.ndindex(self.num_replicas, self.num_cores_per_replica):
            place = self.coordinates(replica, core)
            task = topology.task_ordinal_at_coordinates(place)
            if place in seen:
                raise InvalidArgument(
                    f"A core belongs to one replica, once; {list(place)} was given more than once. "
                    "Correct `core_assignment`."
                )
            seen.add(place)
            self._replicas_at.setdefault((task, core), []).append(replica)

    @classmethod
    def build(
        cls,
        topology: Topology,
        computation_shape: object = None,
        computation_stride: object = None,
        num_replicas: int = 1,
        device_order_mode: DeviceOrderMode = DeviceOrderMode.AUTO,
    ) -> DeviceAssignment:
        """Make replicas of blocks of cores that are close to each other.

        Args:
          topology: Where the cores lie.
          computation_shape: The sizes (x, y, z, core) of each replica's block; by default, one
            core.
          computation_stride: The distance between the cores of a replica along each axis; by
            default, they are adjacent.
          num_replicas: The number of replicas.
          device_order_mode: The order in which chips are taken. Rings need blocks of whole chips
            that fill the mesh.
        """
        blocks = _Blocks.of(
            _checked(topology),
            _checked_block("computation_shape", computation_shape, topology),
            _checked_block("computation_stride", computation_stride, topology),
            _checked_count(num_replicas),
        )
        order = _checked_order(device_order_mode)
        missing = topology.missing_devices.size
        if order is DeviceOrderMode.RING and (missing or not blocks.can_form_rings):
            raise InvalidArgument(
                "`DeviceOrderMode.RING` needs replicas of whole chips that fill the mesh, without "
                f"a stride; got {blocks}{', of a mesh with missing devices' if missing else ''}. "
                "Use `DeviceOrderMode.AUTO`."
            )
        if missing:
            return cls(topology, blocks.in_order_of_tasks())
        rings = blocks.can_form_rings and order is not DeviceOrderMode.MESH
        return cls(topology, blocks.as_rings() if rings else blocks.as_mesh())

    @property
    def topology(self) -> Topology:
        """The topology, which says where the cores lie."""
        return self._topology

    @property
    def num_cores_per_replica(self) -> int:
        """The number of logical devices of each replica."""
        return self._core_assignment.shape[1]

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return self._core_assignment.shape[0]

    @property
    def core_assignment(self) -> np.ndarray:
        """The coordinates of the cores: an array of shape replicas x cores per replica x 4."""
        return self._core_assignment

    @property
    def devices(self) -> tuple[tuple[jax.Device, ...], ...]:
        """The devices of each replica."""
        return tuple(
            tuple(self._topology.device_at_coordinates(place) for place in replica)
            for replica in self._core_assignment.tolist()
        )

    def coordinates(self, replica: int, logical_core: int) -> tuple[int, ...]:
        """Return the coordinates of a logical device of a replica."""
        counts = self.num_replicas, self.num_cores_per_replica
        if not (0 <= replica < counts[0] and 0 <= logical_core < counts[1]):
            raise InvalidArgument(
                f"There are {counts[0]} replica(s) of {counts[1]} logical core(s); got replica "
                f"{replica}, logical core {logical_core}. Both are counted from 0."
            )
        return tuple(self._core_assignment[replica, logical_core].tolist())

    def lookup_replicas(self, task_id: int, logical_core: int) -> list[int]:
        """Return the replicas whose logical device of this number is in a task."""
        if (task_id, logical_core) not in self._replicas_at:
            raise InvalidArgument(
                f"No replica has its logical core {logical_core} in task {task_id}. There are "
                f"{self._topology.num_tasks} task(s), and {self.num_cores_per_replica} logical "
                "core(s) of each replica; both are counted from 0."
            )
        return list(self._replicas_at[task_id, logical_core])

    def tpu_ordinal(self, replica: int = 0, logical_core: int = 0) -> int:
        """Return the number of a logical device among the devices of its task."""
        place = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_ordinal_at_coordinates(place)

    def host_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Return the name of the CPU of the process that has a logical device."""
        place = self.coordinates(replica, logical_core)
        return self._topology.cpu_device_name_at_coordinates(place, job)

    def tpu_device(self, replica: int = 0, logical_core: int = 0, job: str | None = None) -> str:
        """Return the reference's name for a logical device."""
        place = self.coordinates(replica, logical_core)
        return self._topology.tpu_device_name_at_coordinates(place, job)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceAssignment):
            return NotImplemented
        same = np.array_equal(self._core_assignment, other._core_assignment)
        return same and self._topology == other._topology

    def __hash__(self) -> int:
        return hash((self._topology, self._core_assignment.tobytes()))

    def __repr__(self) -> str:
        return (
            f"DeviceAssignment({self.num_replicas} replica(s) of {self.num_cores_per_replica} "
            "core(s))"
        )


class _Blocks:
    """Equal blocks of cores, to be placed in a mesh."""

    def __init__(self, topology: Topology, shape: np.ndarray, stride: np.ndarray, count: int):
        self._topology, self._shape, self._stride, self._count = topology, shape, stride, count
        self._footprint = shape * stride
        # With a stride, the cores of other blocks fit in between.
        self._limits: list[int] = (topology.mesh_shape // self._footprint * stride).tolist()

    @classmethod
    def of(cls, topology: Topology, shape: np.ndarray, stride: np.ndarray, count: int) -> _Blocks:
        """Make blocks; refuse them if the mesh has no room for them."""
        blocks = cls(topology, shape, stride, count)
        if math.prod(blocks._limits) < count:
            raise InvalidArgument(
                f"A mesh of shape {topology.mesh_shape.tolist()} has room for "
                f"{math.prod(blocks._limits)} replica(s) of `computation_shape` {shape.tolist()} "
                f"and `computation_stride` {stride.tolist()}; got `num_replicas` {count}. Ask for "
                "fewer replicas, or for smaller ones."
            )
        return blocks

    @property
    def can_form_rings(self) -> bool:
        whole_chips = self._shape[-1] == self._topology.mesh_shape[-1]
        full = self._count == math.prod(self._limits)
        return bool(whole_chips and full and (self._stride == 1).all())

    def as_rings(self) -> list[object]:
        """Return a ring of replicas, each of which is a ring of chips."""
        x, y, z, cores = self._shape.tolist()
        chips, corners = ring((x, y, z)), ring(self._grid()[:3])
        return [
            [
                [*(np.multiply(corner, (x, y, z)) + chip).tolist(), core]
                for chip in chips
                for core in range(cores)
            ]
            for corner in corners
        ]

    def as_mesh(self) -> list[object]:
        """Return replicas one after another, first core by core, then along x, y and z."""
        x, y, z, cores = self._grid()
        positions = [(i, j, k, core) for k, j, i, core in np.ndindex(z, y, x, cores)]
        within = np.array(list(np.ndindex(*self._shape.tolist()))) * self._stride
        return [
            within + position // self._stride * self._footprint + position % self._stride
            for position in np.array(positions)[: self._count]
        ]

    def in_order_of_tasks(self) -> list[object]:
        """Return replicas made of existing devices in order, because blocks would have holes."""
        size = math.prod(self._shape.tolist())
        present = self._topology.device_coordinates.reshape(-1, self._topology.mesh_rank)
        if (self._stride != 1).any() or size * self._count > len(present):
            raise InvalidArgument(
                f"{len(self._topology.missing_devices)} device(s) of the mesh are missing, so that "
                f"replicas are {len(present)} device(s) in order, without a stride; got {self}. "
                "Leave `computation_stride` out, or ask for fewer or smaller replicas."
            )
        return list(present[: size * self._count].reshape(self._count, size, -1))

    def _grid(self) -> tuple[int, int, int, int]:
        """Return how many replicas lie along each axis: as close to a cube as possible.

        The axis with the least room is filled first, so that the others have room for the rest.
        Among equal ones, the cores of a chip come first, then x, y and z, because the chips of one
        machine are adjacent in x and y.
        """
        sizes, remaining = [1, 1, 1, 1], self._count
        order = sorted(range(4), key=lambda axis: (self._limits[axis], (axis + 1) % 4))
        for dimensions, axis in zip((4, 3, 2, 1), order, strict=True):
            edge = next(n for n in itertools.count(1) if n**dimensions >= remaining)
            sizes[axis] = min(edge, self._limits[axis])
            remaining = math.ceil(remaining / sizes[axis])
        x, y, z, cores = sizes
        return x, y, z, cores

    def __str__(self) -> str:
        return (
            f"{self._count} replica(s) of `computation_shape` {self._shape.tolist()} and "
            f"`computation_stride` {self._stride.tolist()} in a mesh of shape "
            f"{self._topology.mesh_shape.tolist()}"
        )


def ring(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the chips of a block in a ring: each next to the one before, the last to the first.

    If there is no ring, because there is only one row or a size is odd, they go row by row.

    >>> from replicax.tpu._device_assignment import ring
    >>> ring((2, 2, 1))
    [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)]
    """
    wide = [axis for axis, size in enumerate(sizes) if size > 1]
    if len(wide) < 2 or any(sizes[axis] % 2 for axis in wide):
        return [(i, j, k) for k, j, i in np.ndindex(*reversed(sizes))]
    axes = [*wide, *(axis for axis, size in enumerate(sizes) if size == 1)]
    width, height, depth = (sizes[axis] for axis in axes)
    # In each layer, the path goes back and forth through all columns but the first, and returns
    # through that one.
    layer = [
        (column, row)
        for row in range(height)
        for column in (range(1, width) if row % 2 == 0 else range(width - 1, 0, -1))
    ] + [(0, row) for row in range(height - 1, 0, -1)]
    way = [(0, 0, 0)]
    for level in range(depth):
        way += [(*chip, level) for chip in (layer if level % 2 == 0 else layer[::-1])]
    way += [(0, 0, level) for level in range(depth - 1, 0, -1)]
    return [tuple(chip[axes.index(axis)] for axis in range(3)) for chip in way]


def _checked(topology: object) -> Topology:
    if not isinstance(topology, Topology):
        raise InvalidType(
            "`topology` must be an `rx.tpu.experimental.Topology`; got "
            f"{topology!r}. `rx.tpu.experimental.initialize_tpu_system(resolver)` returns one."
        )
    return topology


def _checked_block(name: str, block: object, topology: Topology) -> np.ndarray:
    advice = "Give four positive numbers (x, y, z, core), such as [1, 1, 1, 2]."
    if block is None:
        block = [1] * topology.mesh_rank
    sizes = integers(name, block, (topology.mesh_rank,), advice)
    if (sizes < 1).any():
        raise InvalidArgument(f"`{name}` must be positive; got {sizes.tolist()}. {advice}")
    return sizes


def _checked_count(num_replicas: object) -> int:
    if not isinstance(num_replicas, (int, np.integer)) or isinstance(num_replicas, bool):
        raise InvalidType(
            f"`num_replicas` must be a whole number; got {num_replicas!r}. Give 1 or more."
        )
    if num_replicas < 1:
        raise InvalidArgument(
            f"`num_replicas` must be positive; got {num_replicas}. Give 1 or more."
        )
    return int(num_replicas)


def _checked_order(device_order_mode: object) -> DeviceOrderMode:
    try:
        return DeviceOrderMode(device_order_mode)
    except ValueError:
        raise InvalidArgument(
            f"`device_order_mode` must be a DeviceOrderMode; got {device_order_mode!r}. Give "
            "`DeviceOrderMode.AUTO`, `RING` or `MESH`."
        ) from None
