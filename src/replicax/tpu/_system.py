"""The calls with which programs for the reference initialize and shut down TPUs."""

from __future__ import annotations

from replicax.cluster.resolvers._tpu import TPUClusterResolver
from replicax.errors import InvalidType
from replicax.tpu._topology import Topology


def initialize_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> Topology:
    """Return the topology of a resolver's devices.

    JAX initializes TPUs by itself when it starts, so nothing else is done. Calling this again is
    safe: nothing is cleared, and variables keep their values.

    Args:
      cluster_resolver: The resolver that knows the devices; by default, one for all TPUs of this
        process.

    >>> import replicax as rx
    >>> resolver = rx.cluster_resolver.TPUClusterResolver(tpu="local")
    >>> rx.tpu.experimental.initialize_tpu_system(resolver)  # eight virtual CPU devices
    Topology(mesh_shape=[1, 2, 2, 2], 1 task(s) with 8 device(s) each)
    """
    return Topology.of(checked_resolver("cluster_resolver", cluster_resolver).devices())


def shutdown_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> None:
    """Do nothing: JAX releases TPUs when the process ends.

    Args:
      cluster_resolver: The resolver that knows the devices.
    """
    checked_resolver("cluster_resolver", cluster_resolver)


def checked_resolver(name: str, resolver: object) -> TPUClusterResolver:
    """Return the resolver, which must be for TPUs; for None, one for this process's TPUs.

    For a list of devices, or of their names, return a resolver that has these.
    """
    if resolver is None:
        return TPUClusterResolver()
    if isinstance(resolver, (list, tuple)):
        return TPUClusterResolver(resolver)
    if not isinstance(resolver, TPUClusterResolver):
        raise InvalidType(
            f"`{name}` must be an `rx.cluster_resolver.TPUClusterResolver`; got {resolver!r}. "
            "Several machines work together by `rx.MultiWorkerMirroredStrategy`."
        )
    return resolver
