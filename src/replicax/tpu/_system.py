"""What the reference does before it uses TPUs, and after."""

from __future__ import annotations

from typing import Any

from replicax.errors import InvalidType
from replicax.tpu._resolver import TPUClusterResolver
from replicax.tpu._topology import Topology


def initialize_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> Topology:
    """Where the devices of a resolver lie.

    JAX initializes TPUs by itself when it starts, so nothing else is done. To call it again is
    fine: nothing is cleared, and variables keep their values.

    Args:
      cluster_resolver: Knows the devices; by default all TPUs of this process.

    >>> import replicax as rx
    >>> resolver = rx.cluster_resolver.TPUClusterResolver(tpu="local")
    >>> rx.tpu.experimental.initialize_tpu_system(resolver)  # eight virtual CPU devices
    Topology(mesh_shape=[1, 2, 2, 2], 1 task(s) with 8 device(s) each)
    """
    return Topology.of(checked_resolver("cluster_resolver", cluster_resolver).devices())


def shutdown_tpu_system(cluster_resolver: TPUClusterResolver | None = None) -> None:
    """Does nothing: JAX gives TPUs back when the process ends.

    Args:
      cluster_resolver: Knows the devices.
    """
    checked_resolver("cluster_resolver", cluster_resolver)


def checked_resolver(name: str, resolver: Any) -> TPUClusterResolver:
    """The resolver, if it is one of TPUs; the one of this process's TPUs for None.

    Of devices, or of their names, one that has these.
    """
    if resolver is None:
        return TPUClusterResolver()
    if isinstance(resolver, (list, tuple)):
        return TPUClusterResolver(resolver)
    if not isinstance(resolver, TPUClusterResolver):
        raise InvalidType(
            f"`{name}` has to be an `rx.cluster_resolver.TPUClusterResolver`; got {resolver!r}. "
            "Several machines work together by `rx.MultiWorkerMirroredStrategy`."
        )
    return resolver
