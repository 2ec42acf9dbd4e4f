"""The TPUs of this machine, or the devices that stand in for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import final

import jax

from replicax._describing import described
from replicax._known_bad import set_curing_flags
from replicax._typing import DeviceLike
from replicax.cluster._spec import ClusterSpec
from replicax.cluster.resolvers._environment import Signs
from replicax.cluster.resolvers._resolver import ClusterResolver
from replicax.errors import ClusterError, DeviceError, InvalidType
from replicax.topology import resolve_devices

_LOCAL = "local"
_HOSTS = "TPU_WORKER_HOSTNAMES"


@final
class TPUClusterResolver(ClusterResolver):
    """The resolver of this process's TPUs; without any, its CPU devices stand in for them.

    Devices are not looked for until `devices()` is called, which starts JAX.

    Args:
      tpu: "" for the TPUs that JAX finds in this process. "local" for the same or, if there are
        none, the CPU devices of this process. Otherwise, a sequence of devices or of their names.

    >>> import replicax as rx
    >>> resolver = rx.cluster_resolver.TPUClusterResolver(tpu="local")
    >>> resolver.num_accelerators()  # eight virtual CPU devices
    {'TPU': 8}
    """

    _signs = Signs(("TPU_WORKER_ID", _HOSTS))

    def __init__(self, tpu: str | Sequence[DeviceLike] | None = "") -> None:
        tpu = "" if tpu is None else tpu
        if isinstance(tpu, str) and tpu not in ("", _LOCAL):
            raise ClusterError(
                f"A TPU is not reached by its name or its address; got tpu={tpu!r}. With JAX the "
                'program runs on the machine that has the TPU: start it there, with tpu="". To '
                'try it on a machine without TPUs, give tpu="local"; to choose devices, a list of '
                'them, such as ["TPU:0", "TPU:1"].'
            )
        if not isinstance(tpu, (str, Sequence)):
            raise InvalidType(
                f'`tpu` must be a string or a sequence of devices; got {tpu!r}. Give tpu="" '
                'for the TPUs of this machine, tpu="local" to try it without any.'
            )
        self._tpu = tpu if isinstance(tpu, str) else tuple(tpu)
        self._task_type, self._task_id = "worker", 0

    @classmethod
    def connect(cls, tpu: str | Sequence[DeviceLike] | None = "") -> TPUClusterResolver:
        """Return a resolver whose devices have been found; there is nothing to connect to."""
        resolver = cls(tpu)
        resolver.devices()
        return resolver

    def devices(self) -> tuple[jax.Device, ...]:
        """Return the devices, which starts JAX."""
        if not isinstance(self._tpu, str):
            return resolve_devices(self._tpu)
        set_curing_flags()
        try:
            return tuple(jax.local_devices(backend="tpu"))
        except RuntimeError as error:  # there is no backend of this kind
            if self._tpu == _LOCAL:
                return tuple(jax.local_devices(backend="cpu"))
            raise DeviceError(
                f'There are no TPUs in this process. JAX says "{error}". On a machine with TPUs, '
                "install `jax[tpu]`. On any other, try the program on virtual CPU devices: "
                '`TPUClusterResolver(tpu="local")`, after `rx.config.set_logical_cpu_devices(8)`.'
            ) from None

    def cluster_spec(self) -> ClusterSpec:
        """Return an empty cluster: this process is on its own.

        On one of several machines of a TPU slice it is not, and an error says so.
        """
        hosts = [host for host in os.environ.get(_HOSTS, "").split(",") if host.strip()]
        if len(hosts) > 1:
            raise ClusterError(
                f"This machine is one of {len(hosts)} of a TPU slice ({_HOSTS} is "
                f"{described(','.join(hosts))}), and a `TPUClusterResolver` is for one machine. "
                "Set TF_CONFIG on every worker, or use a resolver that names all of them."
            )
        return ClusterSpec({})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return an empty address: there is nothing to connect to."""
        del task_type, task_id, rpc_layer
        return ""

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return this process's number of TPUs, or of devices that stand in for them; start JAX."""
        del task_type, task_id, config_proto
        here = jax.process_index()
        return {"TPU": sum(device.process_index == here for device in self.devices())}
