"""The strategies of v1, made of the same parts as the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from replicax._typing import DeviceLike
from replicax.cluster import ClusterResolver
from replicax.collectives import (
    CommunicationImplementation,
    CommunicationOptions,
    CrossDeviceOps,
    require_cross_device_ops,
)
from replicax.compat.v1._strategy import Strategy
from replicax.errors import InvalidArgument
from replicax.strategies import central_storage, mirrored, multi_worker, one_device


@final
class OneDeviceStrategy(Strategy):
    """A strategy that places everything on one device.

    >>> import replicax as rx
    >>> strategy = rx.compat.v1.OneDeviceStrategy(device="/cpu:0")
    >>> sum(strategy.run(lambda x: x * 2, args=(i,)) for i in range(10))
    90
    """

    def __init__(self, device: DeviceLike) -> None:
        super().__init__(one_device(self, device))


@final
class MirroredStrategy(Strategy):
    """One replica per device, with a copy of every variable on each, kept equal."""

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        require_cross_device_ops(cross_device_ops)
        super().__init__(mirrored(self, devices))

    def _session_settings(self) -> Mapping[str, object]:
        return {"isolate_session_state": True}


@final
class CentralStorageStrategy(Strategy):
    """One replica per device; every variable has one copy, on the parameter device."""

    def __init__(
        self,
        compute_devices: Sequence[DeviceLike] | None = None,
        parameter_device: DeviceLike | None = None,
    ) -> None:
        super().__init__(central_storage(self, compute_devices, parameter_device))

    def _session_settings(self) -> Mapping[str, object]:
        return {"isolate_session_state": True}


@final
class ParameterServerStrategy(Strategy):
    """A name that is kept to say what to use: the strategy of v1 needs sessions.

    >>> import replicax as rx
    >>> rx.compat.v1.experimental.ParameterServerStrategy()
    Traceback (most recent call last):
    ...
    replicax.errors.InvalidArgument: The ParameterServerStrategy of v1 runs a program on each \
worker, in sessions, which JAX does not have; got the arguments () {}. Use \
`rx.ParameterServerStrategy` with an `rx.coordinator.ClusterCoordinator`: docs/parameter_servers.md.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise InvalidArgument(
            "The ParameterServerStrategy of v1 runs a program on each worker, in sessions, which "
            f"JAX does not have; got the arguments {args} {kwargs}. Use "
            "`rx.ParameterServerStrategy` with an `rx.coordinator.ClusterCoordinator`: "
            "docs/parameter_servers.md."
        )


@final
class MultiWorkerMirroredStrategy(Strategy):
    """One replica on each device of every worker, with equal copies of all variables."""

    def __init__(
        self,
        communication: CommunicationImplementation = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        options = CommunicationOptions(implementation=communication)
        super().__init__(multi_worker(self, cluster_resolver, options))

    def _session_settings(self) -> Mapping[str, object]:
        resolver = self.cluster_resolver
        if resolver is None or not self.topology.spans_processes:
            return {}
        leader = "chief" if "chief" in resolver.cluster_spec().jobs else "worker"
        return {
            "device_filters": [f"/job:{resolver.task_type}/task:{resolver.task_id}"],
            "experimental": {"collective_group_leader": f"/job:{leader}/replica:0/task:0"},
        }
