"""The devices to compile for, by the name of a topology such as "v5e:4x4"."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import numpy as np

from replicax._describing import described
from replicax.errors import DeviceError, InvalidType
from replicax.planning._chips import CHIPS, Chip
from replicax.topology import Topology, resolve_device, resolve_devices

_FLAT = ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"]
_CUBES = [
    "2x2x1",
    "2x2x2",
    "2x2x4",
    "2x4x4",
    "4x4x4",
    "4x4x8",
    "4x8x8",
    "8x8x8",
    "8x8x16",
    "8x16x16",
    "16x16x16",
]
# The available shapes; libtpu describes any shape with two even sides, even if never built.
SHAPES = {
    "v4": _CUBES,
    "v5e": _FLAT,
    "v5p": [*_CUBES, "16x16x24"],
    "v6e": _FLAT,
    "tpu7x": _CUBES,
}

_CPUS = re.compile(r"cpu:([1-9]\d*)")

# Without these settings, where there is no TPU, libtpu looks for one, complains at length, and can
# be loaded by only one process at a time.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


@final
@dataclass(frozen=True, slots=True)
class Target:
    """Devices to compile for, which need not exist.

    Args:
      name: The name of the topology.
      chip: The published figures of its chips, or None for CPUs.
      sides: The sides of the grid that its chips form.
      devices: The devices, as JAX describes them.
    """

    name: str
    chip: Chip | None
    sides: tuple[int, ...]
    devices: tuple[jax.Device, ...]

    @property
    def chips(self) -> int:
        return len(self.devices) // (self.chip.devices if self.chip else 1)

    def topology(self, computation_shape: Sequence[int] | None) -> Topology:
        """Return the devices grouped into replicas, each of neighbouring devices.

        Args:
          computation_shape: The sides of a replica's block of chips; None for one device each.
        """
        if computation_shape is None:
            return Topology(tuple((device,) for device in self.devices))
        block = tuple(computation_shape) if isinstance(computation_shape, Sequence) else ()
        if not block or not all(isinstance(side, int) and side > 0 for side in block):
            raise DeviceError(
                "`computation_shape` has the sides of a replica's block of chips, such as (2, 2); "
                f"got {described(computation_shape)}."
            )
        sides = (*self.sides, *(1,) * (len(block) - len(self.sides)))
        block = (*block, *(1,) * (len(sides) - len(block)))
        if any(side % part for side, part in zip(sides, block, strict=True)):
            raise DeviceError(
                f"{self.name} cannot be divided into blocks of {'x'.join(map(str, block))} chips: "
                "each side of the topology must be a multiple of the block's."
            )
        replicas: dict[tuple[int, ...], list[jax.Device]] = {}
        for device, place in zip(self.devices, self._places(sides), strict=True):
            corner = tuple(int(at) // part for at, part in zip(place, block, strict=True))
            replicas.setdefault(corner, []).append(device)
        return Topology(tuple(map(tuple, replicas.values())))

    def _places(self, sides: tuple[int, ...]) -> list[Any]:
        """Return the place of each device's chip in the grid."""
        if self.chip is None:
            return [np.unravel_index(index, sides) for index in range(len(self.devices))]
        rank = len(sides)
        return [tuple((*device.coords, *(0,) * rank)[:rank]) for device in self.devices]


def target_of(name: str) -> Target:
    """Return the devices of a topology.

    >>> from replicax.planning._topologies import target_of
    >>> target_of("cpu:4").chips
    4
    """
    name = _plain(name)
    if found := _CPUS.fullmatch(name):
        return _cpus(name, int(found[1]))
    kind, _, shape = name.partition(":")
    if kind in ("gpu", "cuda", "rocm"):
        raise DeviceError(
            f"The topology {name!r} cannot be planned for: to compile for GPUs that are not there, "
            "XLA needs the CUDA plugin of JAX and a description of the GPU; see docs/planning.md. "
            f"Those that work: {_listed()}."
        )
    if shape not in SHAPES.get(kind, ()):
        raise DeviceError(f"There is no topology {name!r}. Those that work: {_listed()}.")
    return _tpus(name, CHIPS[kind], shape)


def _plain(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidType(
            f"A topology is given by its name; got {described(name)}. Those that work: {_listed()}."
        )
    return name.strip().lower()


def _listed() -> str:
    names = [f"{kind}:{'|'.join(shapes)}" for kind, shapes in SHAPES.items()]
    return f"{', '.join(names)}, cpu:1 and up"


def prepare(names: Sequence[str]) -> None:
    """Split the CPU for the largest topology, before JAX starts for the first one."""
    counts = [int(found[1]) for name in names if (found := _CPUS.fullmatch(_plain(name)))]
    if counts:
        resolve_device(f"CPU:{max(counts) - 1}")


def _cpus(name: str, count: int) -> Target:
    # This splits the CPU if JAX has not started; if it has, the error says how to split it.
    resolve_device(f"CPU:{count - 1}")
    devices = resolve_devices([f"CPU:{index}" for index in range(count)])
    return Target(name, None, (count,), devices)


def _tpus(name: str, chip: Chip, shape: str) -> Target:
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if chip.name == "v4":
        options["chip_config_name"] = "megacore"  # one device per chip, as in practice
    if shape == "1x1":
        options["chips_per_host_bounds"] = (1, 1, 1)  # by default a host has four
    try:
        with _quiet():
            described = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except RuntimeError as error:
        if "not installed" in str(error):
            raise DeviceError(
                f"Planning for {name!r} needs libtpu, which has the compiler for TPUs, and which "
                "is not installed. Install it: `pip install 'replicax[tpu]'`; no TPU is needed."
            ) from error
        raise DeviceError(f"libtpu cannot describe {name!r}: {error}") from error
    sides = tuple(int(side) for side in shape.split("x"))
    devices = tuple(described.devices)
    if len(devices) != math.prod(sides) * chip.devices:
        raise DeviceError(
            f"libtpu describes {name!r} as {len(devices)} devices; {math.prod(sides)} chips of "
            f"{chip.devices} device(s) were expected. Use the libtpu that `replicax[tpu]` asks for."
        )
    return Target(name, chip, sides, devices)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Set what libtpu needs in order to load without a TPU; if there is one, change nothing."""
    absent = {} if _has_tpu() else {k: v for k, v in _WITHOUT_TPU.items() if k not in os.environ}
    os.environ.update(absent)
    try:
        yield
    finally:
        for name in absent:
            os.environ.pop(name, None)


def _has_tpu() -> bool:
    return any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*"))
