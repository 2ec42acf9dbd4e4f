"""Settings of the process: `rx.config.set_logical_cpu_devices(n)`."""

from replicax.topology import set_logical_cpu_devices

__all__ = ["set_logical_cpu_devices"]
