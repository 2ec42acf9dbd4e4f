"""Settings of the process: `rx.config.set_logical_cpu_devices(n)` and the like."""

from replicax._public import publish as _publish
from replicax.execution import audit_functions, compilation_cache, run_functions_eagerly
from replicax.topology import set_logical_cpu_devices
from replicax.variables import check_mirrored

__all__ = [
    "audit_functions",
    "check_mirrored",
    "compilation_cache",
    "run_functions_eagerly",
    "set_logical_cpu_devices",
]

_publish(globals())
