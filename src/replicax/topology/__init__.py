"""The devices, and which of them form which replica."""

from replicax.topology._devices import (
    best_devices,
    resolve_device,
    resolve_devices,
    set_logical_cpu_devices,
)
from replicax.topology._topology import REPLICA_AXIS, DeviceOrSharding, Topology

__all__ = [
    "REPLICA_AXIS",
    "DeviceOrSharding",
    "Topology",
    "best_devices",
    "resolve_device",
    "resolve_devices",
    "set_logical_cpu_devices",
]
