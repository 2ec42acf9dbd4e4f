"""Device names, and splitting the host CPU into several devices."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

import jax

from replicax._known_bad import set_curing_flags
from replicax._typing import DeviceLike
from replicax.errors import DeviceError

_FULL_NAME = re.compile(
    r"""(?:/job:\w+(?=/))?
        (?:/replica:\d+(?=/))?
        (?:/task:(?P<task>\d+)(?=/))?
        (?:/?device:|/)?
        (?P<platform>[a-z]+)(?::(?P<index>\d+))?""",
    re.VERBOSE | re.IGNORECASE,
)
_FORCED_COUNT = "--xla_force_host_platform_device_count"


@dataclass(frozen=True, slots=True)
class _Name:
    platform: str
    index: int
    task: int | None

    @classmethod
    def parse(cls, text: str) -> _Name:
        match = _FULL_NAME.fullmatch(text.strip())
        if match is None:
            raise DeviceError(
                f"{text!r} is not a device name. Names look like 'CPU:0', '/cpu:0', "
                "'/device:GPU:1' or '/job:worker/replica:0/task:1/device:CPU:0'."
            )
        task = match["task"]
        return cls(
            match["platform"].lower(),
            int(match["index"] or 0),
            None if task is None else int(task),
        )


def resolve_device(device: DeviceLike) -> jax.Device:
    """Return the device that a name, in any of the usual forms, stands for.

    >>> import replicax as rx
    >>> from replicax.topology import resolve_device
    >>> resolve_device("/device:CPU:1").id
    1
    """
    return resolve_devices([device])[0]


def resolve_devices(devices: Iterable[DeviceLike]) -> tuple[jax.Device, ...]:
    """Resolve several devices, splitting the host CPU as far as their names require."""
    if isinstance(devices, (str, jax.Device)):
        devices = [devices]
    set_curing_flags()
    names = [_name_or_device(device) for device in devices]
    cpus = [name.index + 1 for name in names if isinstance(name, _Name) and name.platform == "cpu"]
    if cpus:
        _split_host_cpu_unless_told_how(max(cpus))
    return tuple(_find(name) if isinstance(name, _Name) else name for name in names)


def _name_or_device(device: DeviceLike) -> _Name | jax.Device:
    if isinstance(device, jax.Device):
        return device
    if isinstance(device, str):
        return _Name.parse(device)
    raise DeviceError(f"A device is a name or a `jax.Device`; got {device!r}.")


def best_devices() -> tuple[jax.Device, ...]:
    """Return all local devices of the best kind: accelerators if there are any, otherwise CPUs."""
    set_curing_flags()
    return tuple(jax.local_devices())


def set_logical_cpu_devices(count: int) -> None:
    """Split the host CPU into `count` devices; call it before JAX is first used.

    Asking for the current number again does nothing.
    """
    if count < 1:
        raise DeviceError(f"The host CPU cannot be split into {count!r} devices; give 1 or more.")
    set_curing_flags()
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        present = len(jax.local_devices(backend="cpu"))
        if present != count:
            raise DeviceError(
                f"JAX is already running with {present} CPU device(s) and cannot be given {count} "
                "now. Call `rx.config.set_logical_cpu_devices` before anything that uses JAX."
            ) from None


def _split_host_cpu_unless_told_how(count: int) -> None:
    already_set = jax.config.values["jax_num_cpu_devices"] > 0 or _FORCED_COUNT in os.environ.get(
        "XLA_FLAGS", ""
    )
    if already_set or count == 1:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        # JAX is running already. If the device does not exist, `_find` says what to do.
        return


def _find(name: _Name) -> jax.Device:
    task = jax.process_index() if name.task is None else name.task
    try:
        candidates = jax.devices(name.platform)
    except RuntimeError:  # no backend of this kind
        candidates = []
    found = [device for device in candidates if device.process_index == task]
    if name.index < len(found):
        return found[name.index]
    place = f"{name.platform.upper()}:{name.index}"
    if task != jax.process_index():
        place += f" of task {task}"
    advice = ""
    if name.platform == "cpu" and task == jax.process_index():
        advice = (
            f" To split the host CPU, call `rx.config.set_logical_cpu_devices({name.index + 1})` "
            "before anything that uses JAX."
        )
    raise DeviceError(f"There is no device {place}. The devices are: {_inventory()}.{advice}")


def _inventory() -> str:
    devices = list(jax.devices())
    if jax.default_backend() != "cpu":
        devices += jax.devices("cpu")
    tasks = {device.process_index for device in devices}
    names: list[str] = []
    for task in sorted(tasks):
        prefix = f"/task:{task}/" if len(tasks) > 1 else ""
        counts: dict[str, int] = {}
        for device in devices:
            if device.process_index == task:
                index = counts.get(device.platform, 0)
                counts[device.platform] = index + 1
                names.append(f"{prefix}{device.platform.upper()}:{index}")
    return ", ".join(names)
