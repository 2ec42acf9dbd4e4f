"""`rx.tpu.experimental`: names that the reference keeps there."""

from replicax._public import publish as _publish
from replicax.tpu._device_assignment import DeviceAssignment, DeviceOrderMode
from replicax.tpu._system import initialize_tpu_system, shutdown_tpu_system
from replicax.tpu._topology import Topology

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]

_publish(globals())
