"""The Ray cluster of a strategy: its nodes, and the actors on them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, final

from replicax.cluster import ClusterSpec
from replicax.errors import StartFailed
from replicax.parameter_server._actors import ActorLost
from replicax.parameter_server._library import ray
from replicax.parameter_server._nodes import Node, await_head, free_port
from replicax.parameter_server._ray_actor import LOOKING, Host, RayActor
from replicax.parameter_server._roles import Hosts, Role, roles_of
from replicax.parameter_server._token import require_token

_HEAD_SECONDS = 60.0
_NODES_SECONDS = 180.0
_QUIET_SECONDS = 5.0  # after which the chief says whom it is waiting for
_LOCAL_HOST = "127.0.0.2"  # see `Hosts`


@final
class RayCluster:
    """A connection of this process to Ray.

    Args:
      address: The address of the cluster.
      head: Its first node, if it was started here.
      by_role: Whether the nodes have a resource for each role.
    """

    def __init__(self, address: str, head: Node | None, *, by_role: bool) -> None:
        library = ray()
        self._head, self._by_role = head, by_role
        self._connected = False
        if library.is_initialized():
            if head is not None:
                head.stop()
                raise StartFailed(
                    "This process is connected to a Ray cluster already, and can be part of one "
                    "only. Make the strategy first; or give `RayClusterResolver` the address of "
                    "that cluster, which may be 'auto'."
                )
            return
        host = {} if head is None else {"_node_ip_address": address.rpartition(":")[0]}
        try:
            library.init(
                address=address,
                log_to_driver=False,
                logging_level="error",
                ignore_reinit_error=True,
                **host,
            )
        except Exception as error:
            if head is not None:
                head.stop()
            raise StartFailed(
                f"The Ray cluster at {address!r} cannot be used: {type(error).__name__}: {error}. "
                "Check the address, that the cluster is up (`ray status`), and that it has the "
                "same token and the same version of Ray."
            ) from error
        self._connected = True

    @classmethod
    def on_this_machine(cls, roles: Sequence[Role]) -> RayCluster:
        """Start a cluster of one node, with all roles."""
        require_token(may_make=True)
        port = free_port(_LOCAL_HOST)
        head = Node.head(_LOCAL_HOST, port, {role.resource: 1 for role in roles})
        await_head(head, _LOCAL_HOST, port, _HEAD_SECONDS)
        return cls(f"{_LOCAL_HOST}:{port}", head, by_role=True)

    @classmethod
    def of_servers(cls, spec: ClusterSpec) -> RayCluster:
        """Start the first node of the cluster that the `rx.Server`s of a cluster spec join."""
        require_token(may_make=True)
        hosts = Hosts(spec)
        head = Node.head(hosts.head_host, hosts.head_port, {})
        await_head(head, hosts.head_host, hosts.head_port, _HEAD_SECONDS)
        cluster = cls(hosts.head, head, by_role=True)
        try:
            cluster._await_nodes(roles_of(spec), hosts)
        except BaseException:
            cluster.stop()
            raise
        return cluster

    @classmethod
    def existing(cls, address: str) -> RayCluster:
        """Use a cluster that is there."""
        return cls(address, None, by_role=False)

    def actor(self, role: Role, make: Callable[..., object], *arguments: Any) -> RayActor:
        """Start a process for a role, and return what `make(*arguments)` makes there.

        It begins when there is a node for it; see `is_up`.
        """
        where: dict[str, Any] = {"num_cpus": 0, "resources": {role.resource: 1}}
        if not self._by_role:
            where = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        options = {
            **where,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": 1,
            "concurrency_groups": {LOOKING: 1},
        }
        return RayActor(ray().remote(**options)(Host).remote(make, *arguments))

    def stop(self) -> None:
        """Leave the cluster, and end it if it was started here."""
        if self._connected:
            ray().shutdown()
        if self._head is not None:
            self._head.stop()

    def _await_nodes(self, roles: Sequence[Role], hosts: Hosts) -> None:
        pause, began, said = threading.Event(), time.monotonic(), False
        while missing := self._missing(roles):
            waited = time.monotonic() - began
            names = ", ".join(f"{role} ({hosts.of(role)})" for role in missing)
            if waited > _NODES_SECONDS:
                raise StartFailed(
                    f"These tasks of the cluster have not come within {_NODES_SECONDS:g} s: "
                    f"{names}. The chief waits for them at {hosts.head}. Start "
                    "`rx.Server(...).join()` for each, where they can reach it and have the same "
                    "token; see docs/parameter_servers.md."
                )
            if waited > _QUIET_SECONDS and not said:
                said = True
                print(f"replicax: waiting for {names}", file=sys.stderr, flush=True)
            pause.wait(0.1)

    def _missing(self, roles: Sequence[Role]) -> list[Role]:
        there = ray().cluster_resources()
        return [role for role in roles if not there.get(role.resource)]


def await_actors(actors: Sequence[tuple[Role, RayActor]], seconds: float) -> None:
    """Wait until processes have begun."""
    deadline = time.monotonic() + seconds
    for role, actor in actors:
        try:
            actor.process().result(max(0.1, deadline - time.monotonic()))
        except ActorLost as error:
            raise StartFailed(
                f"The process of {role} could not start: {error}. Look at its log in Ray's "
                "folder, `session_latest/logs`."
            ) from None
        except TimeoutError:
            raise StartFailed(
                f"Ray has not started the process of {role} within {seconds:g} s. A cluster of "
                "your own must have one free CPU for each worker and parameter server: look at "
                "`ray status`."
            ) from None
