"""Which devices there are, and which of them form which replica."""

from replicax.topology._devices import (
    best_devices,
    resolve_device,
    resolve_devices,
    set_logical_cpu_devices,
)
from replicax.topology._topology import REPLICA_AXIS, Home, Topology

__all__ = [
    "REPLICA_AXIS",
    "Home",
    "Topology",
    "best_devices",
    "resolve_device",
    "resolve_devices",
    "set_logical_cpu_devices",
]
