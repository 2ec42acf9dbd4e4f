"""The processes of one strategy: its parameter servers, and its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, final

from replicax.cluster import ClusterResolver
from replicax.cluster.resolvers._ray import RayClusterResolver
from replicax.errors import ClusterError, InvalidType
from replicax.parameter_server._actors import Actor
from replicax.parameter_server._library import ray
from replicax.parameter_server._ray_cluster import RayCluster, await_actors
from replicax.parameter_server._roles import CHIEF, PS, WORKER, Role, roles_of
from replicax.parameter_server._servers import Servers
from replicax.parameter_server._variable_server import VariableServer

_SERVERS_SECONDS = 120.0


class Engine(Protocol):
    """The processes of a strategy, as it and its coordinator see them.

    There is one engine on Ray, and one for tests without processes.
    """

    servers: Servers
    num_workers: int

    def start_worker(self, index: int, make: Callable[..., object], *arguments: Any) -> Actor:
        """Start a worker; it answers once it is there."""
        ...

    def stop(self) -> None:
        """End all processes."""
        ...


def _server_on_cpu() -> VariableServer:
    """Return a server that leaves the accelerators of its machine to the workers."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    return VariableServer()


@final
class RayEngine:
    """The processes of a strategy, on Ray.

    Args:
      resolver: Describes the cluster; this process is its chief.
    """

    def __init__(self, resolver: ClusterResolver) -> None:
        if not isinstance(resolver, ClusterResolver):
            raise InvalidType(
                "`cluster_resolver` must be one of `rx.cluster_resolver`, such as "
                f"`RayClusterResolver(num_workers=2, num_ps=1)`; got {resolver!r}."
            )
        spec = resolver.cluster_spec()
        roles = roles_of(spec)
        if resolver.task_type not in (CHIEF, None):
            raise ClusterError(
                f"A ParameterServerStrategy is made by the chief; this process is "
                f"{resolver.task_type} {resolver.task_id}. Its program is `rx.Server(...).join()`."
            )
        ray()  # says what to do if it is not installed
        if not isinstance(resolver, RayClusterResolver):
            self._cluster = RayCluster.of_servers(spec)
        elif resolver.address is None:
            self._cluster = RayCluster.on_this_machine(roles)
        else:
            self._cluster = RayCluster.existing(resolver.address)
        try:
            servers = [role for role in roles if role.job == PS]
            actors = [(role, self._cluster.actor(role, _server_on_cpu)) for role in servers]
            await_actors(actors, _SERVERS_SECONDS)
        except BaseException:
            self._cluster.stop()
            raise
        places = [spec.task_address(PS, role.index) for role in servers]
        self.servers = Servers([actor for _, actor in actors], places)
        self.num_workers = len(roles) - len(servers)

    def start_worker(self, index: int, make: Callable[..., object], *arguments: Any) -> Actor:
        return self._cluster.actor(Role(WORKER, index), make, *arguments)

    def stop(self) -> None:
        self._cluster.stop()
