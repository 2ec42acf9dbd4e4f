"""The coordinates of TPU cores, as a value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, final

import jax
import numpy as np

from replicax._typing import DeviceLike
from replicax.errors import DeviceError, InvalidArgument
from replicax.topology import resolve_devices
from replicax.tpu._integers import integers

Coordinates = Sequence[int]
_AXES = "(x, y, z, core)"


@final
class Topology:
    """The cores of TPUs in a grid: x, y and z of the chip, and the number of the core on it.

    `initialize_tpu_system` returns the topology of a resolver's devices.

    Args:
      mesh_shape: The sizes of the grid: four positive numbers.
      device_coordinates: The coordinates of each core of each task: an array of shape tasks x
        devices x 4.
      devices: The devices of each task, in the order of their coordinates, if they are known.

    >>> from replicax.tpu.experimental import Topology
    >>> topology = Topology([2, 1, 1, 1], [[[0, 0, 0, 0], [1, 0, 0, 0]]])
    >>> topology.tpu_device_name_at_coordinates([1, 0, 0, 0], job="worker")
    '/job:worker/task:0/device:TPU:1'
    """

    __slots__ = ("_coordinates", "_devices", "_mesh_shape", "_places")

    def __init__(
        self,
        mesh_shape: Any,
        device_coordinates: Any,
        devices: Sequence[Sequence[jax.Device]] | None = None,
    ) -> None:
        self._mesh_shape = _positive_sizes(mesh_shape)
        self._coordinates = integers(
            "device_coordinates",
            device_coordinates,
            (None, None, 4),
            f"Give the coordinates {_AXES} of each device of each task.",
        )
        self._devices = None if devices is None else tuple(tuple(task) for task in devices)
        counts = None if self._devices is None else [len(task) for task in self._devices]
        if counts is not None and counts != [self.num_tpus_per_task] * self.num_tasks:
            raise InvalidArgument(
                f"There must be a device for each of the coordinates, of which {self.num_tasks} "
                f"task(s) have {self.num_tpus_per_task} each; got {counts} device(s). Give as many "
                "devices as coordinates."
            )
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}
        for task, places in enumerate(self._coordinates.tolist()):
            for ordinal, place in enumerate(places):
                self._add(tuple(place), task, ordinal)

    def _add(self, place: tuple[int, ...], task: int, ordinal: int) -> None:
        if not self._contains(place):
            raise InvalidArgument(
                f"Device {ordinal} of task {task} has the coordinates {list(place)}, which the "
                f"mesh of shape {self._mesh_shape.tolist()} does not have. Give it the shape that "
                "all devices fit into."
            )
        if place in self._places:
            raise InvalidArgument(
                f"Every device has coordinates of its own; {list(place)} was given more than once. "
                "Correct `device_coordinates`."
            )
        self._places[place] = task, ordinal

    @classmethod
    def of(cls, devices: Iterable[DeviceLike], *, mesh_shape: object = None) -> Topology:
        """Return the topology of devices.

        TPUs report their own coordinates. Other devices, such as virtual CPU devices, are laid out
        one after another: first the cores of a chip, then chips along x, y and z.

        Args:
          devices: Devices, or their names.
          mesh_shape: The grid for devices that are not TPUs. By default chips have two cores if the
            number of devices is even, and lie in a block that is as close to a cube as possible,
            with x <= y <= z: eight devices are a grid of [1, 2, 2, 2].

        >>> import jax
        >>> from replicax.tpu.experimental import Topology
        >>> Topology.of(jax.devices())  # eight virtual CPU devices
        Topology(mesh_shape=[1, 2, 2, 2], 1 task(s) with 8 device(s) each)
        """
        found = resolve_devices(devices)
        if not found:
            raise DeviceError("A topology needs at least one device; none was given.")
        physical = found[0].platform == "tpu"
        if physical and mesh_shape is not None:
            raise InvalidArgument(
                f"TPUs know where they lie; got `mesh_shape` {mesh_shape!r} for them. Leave it out."
            )
        places = _physical_places(found) if physical else _made_up_places(found, mesh_shape)
        tasks: dict[int, list[jax.Device]] = {}
        for device in found:
            tasks.setdefault(device.process_index, []).append(device)
        by_task = [tasks[process] for process in sorted(tasks)]
        if len({len(task) for task in by_task}) > 1:
            raise DeviceError(
                "Every process has the same number of devices in a topology; got "
                f"{[len(task) for task in by_task]}. Name as many devices of each."
            )
        where = dict(zip(found, places, strict=True))
        shape = np.max(places, axis=0) + 1 if mesh_shape is None else mesh_shape
        return cls(shape, [[where[device] for device in task] for task in by_task], by_task)

    @property
    def mesh_shape(self) -> np.ndarray:
        """The sizes of the grid."""
        return self._mesh_shape

    @property
    def mesh_rank(self) -> int:
        """The number of dimensions of the grid."""
        return len(self._mesh_shape)

    @property
    def device_coordinates(self) -> np.ndarray:
        """The coordinates of each device: an array of shape tasks x devices x 4."""
        return self._coordinates

    @property
    def num_tasks(self) -> int:
        """The number of processes that have devices in the grid."""
        return self._coordinates.shape[0]

    @property
    def num_tpus_per_task(self) -> int:
        """The number of devices of each process."""
        return self._coordinates.shape[1]

    @property
    def missing_devices(self) -> np.ndarray:
        """The coordinates at which there is no device, one per row."""
        every = np.ndindex(*self._mesh_shape.tolist())
        missing = [place for place in every if place not in self._places]
        return np.array(missing, np.int32).reshape(-1, self.mesh_rank)

    def task_ordinal_at_coordinates(self, device_coordinates: Coordinates) -> int:
        """Return the number of the task that has the device at these coordinates."""
        return self._place(device_coordinates)[0]

    def tpu_device_ordinal_at_coordinates(self, device_coordinates: Coordinates) -> int:
        """Return the number, within its task, of the device at these coordinates."""
        return self._place(device_coordinates)[1]

    def cpu_device_name_at_coordinates(
        self, device_coordinates: Coordinates, job: str | None = None
    ) -> str:
        """Return the name of the CPU of the process that has the device at these coordinates."""
        return f"{self._task_name(device_coordinates, job)}/device:CPU:0"

    def tpu_device_name_at_coordinates(
        self, device_coordinates: Coordinates, job: str | None = None
    ) -> str:
        """Return the reference's name for the device at these coordinates."""
        ordinal = self.tpu_device_ordinal_at_coordinates(device_coordinates)
        return f"{self._task_name(device_coordinates, job)}/device:TPU:{ordinal}"

    def device_at_coordinates(self, device_coordinates: Coordinates) -> jax.Device:
        """Return the device at these coordinates."""
        task, ordinal = self._place(device_coordinates)
        if self._devices is None:
            raise DeviceError(
                f"{self!r} was written down, and does not say which devices are meant. Use what "
                "`rx.tpu.experimental.initialize_tpu_system` returns, or `Topology.of(devices)`."
            )
        return self._devices[task][ordinal]

    def _task_name(self, device_coordinates: Coordinates, job: str | None) -> str:
        task = self.task_ordinal_at_coordinates(device_coordinates)
        return f"/task:{task}" if job is None else f"/job:{job}/task:{task}"

    def _place(self, device_coordinates: Coordinates) -> tuple[int, int]:
        place = tuple(int(number) for number in device_coordinates)
        if place not in self._places:
            what = "has no device there" if self._contains(place) else "ends before"
            raise InvalidArgument(
                f"There is no device at the coordinates {list(place)}: the mesh of shape "
                f"{self._mesh_shape.tolist()} {what}. Ask for coordinates {_AXES} that are in "
                "`device_coordinates`."
            )
        return self._places[place]

    def _contains(self, place: tuple[int, ...]) -> bool:
        return len(place) == self.mesh_rank and all(
            0 <= number < size for number, size in zip(place, self._mesh_shape, strict=True)
        )

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Topology) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> Any:
        return (*self._mesh_shape.tolist(), *self._places.items(), self._devices)

    def __repr__(self) -> str:
        return (
            f"Topology(mesh_shape={self._mesh_shape.tolist()}, {self.num_tasks} task(s) with "
            f"{self.num_tpus_per_task} device(s) each)"
        )


def _positive_sizes(mesh_shape: object) -> np.ndarray:
    advice = f"Give the sizes {_AXES} of the grid, such as [2, 2, 1, 2]."
    sizes = integers("mesh_shape", mesh_shape, (4,), advice)
    if (sizes < 1).any():
        raise InvalidArgument(f"`mesh_shape` must be positive; got {sizes.tolist()}. {advice}")
    return sizes


def _physical_places(devices: Sequence[jax.Device]) -> list[list[int]]:
    """Return the coordinates of TPUs, counted from the corner of the block that they are in."""
    strangers = [device for device in devices if device.platform != "tpu"]
    slices = {getattr(device, "slice_index", 0) for device in devices}
    if strangers or len(slices) > 1:
        problem = f"{strangers[0]} is no TPU" if strangers else f"they are of slices {slices}"
        raise DeviceError(
            f"Only the TPUs of one slice lie in a common grid; {problem}. Use the TPUs of one "
            "slice, or `rx.MultiWorkerMirroredStrategy`, which needs no grid."
        )
    places = np.array([[*device.coords, device.core_on_chip] for device in devices])
    return (places - places.min(axis=0)).tolist()


def _made_up_places(devices: Sequence[jax.Device], mesh_shape: object) -> list[list[int]]:
    """Return made-up coordinates for devices without any: core by core, then along x, y and z."""
    count = len(devices)
    shape = _default_shape(count) if mesh_shape is None else _positive_sizes(mesh_shape).tolist()
    if math.prod(shape) != count:
        raise InvalidArgument(
            f"A mesh of shape {shape} has {math.prod(shape)} device(s); got {count}. Give as many "
            "devices as the mesh has, or another `mesh_shape`."
        )
    x, y, z, cores = shape
    return [[i, j, k, core] for k, j, i, core in np.ndindex(z, y, x, cores)]


def _default_shape(count: int) -> list[int]:
    """Return the default grid; that of 8 fits the reference's [1, 1, 1, 2] and [1, 2, 2, 2]."""
    cores = 1 if count % 2 else 2
    chips = count // cores
    blocks = [
        (chips // (x * y), y, x)
        for x in range(1, chips + 1)
        if chips % x == 0
        for y in range(x, chips // x + 1)
        if chips % (x * y) == 0 and chips // (x * y) >= y
    ]
    z, y, x = min(blocks)
    return [x, y, z, cores]
