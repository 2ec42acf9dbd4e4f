"""The tasks of a cluster with parameter servers, and the hosts of their nodes."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import final

from replicax.cluster import ClusterSpec
from replicax.errors import ClusterError

WORKER, PS, CHIEF = "worker", "ps", "chief"
_EXAMPLE = '{"chief": ["host0:2222"], "ps": ["host1:2222"], "worker": ["host2:2222"]}'


@final
@dataclass(frozen=True, slots=True)
class Role:
    """A worker or a parameter server."""

    job: str
    index: int

    @property
    def resource(self) -> str:
        """The resource of Ray that the node of this role has one of."""
        return f"replicax_{self.job}_{self.index}"

    def __str__(self) -> str:
        return f"{self.job} {self.index}"


def roles_of(spec: ClusterSpec) -> list[Role]:
    """Return the parameter servers and the workers; refuse clusters that lack either."""
    for job in (WORKER, PS):
        if job not in spec.jobs or spec.num_tasks(job) == 0:
            raise ClusterError(
                f"A cluster with parameter servers needs the jobs 'worker' and 'ps'; got {spec}, "
                f"which has no {job!r}. Give something like {_EXAMPLE}."
            )
    return [Role(job, index) for job in (PS, WORKER) for index in spec.task_indices(job)]


@final
class Hosts:
    """The addresses of the nodes of a cluster.

    Each of several nodes on one machine has a host of its own. Ray replaces 127.0.0.1 by another
    address of the machine, and keeps 127.0.0.2 and the following ones, which are loopback too.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        if CHIEF not in spec.jobs or spec.num_tasks(CHIEF) != 1:
            raise ClusterError(
                f"A cluster with parameter servers has one task in the job 'chief'; got {spec}. "
                f"Give something like {_EXAMPLE}."
            )
        self._spec = spec
        host, _, port = spec.task_address(CHIEF, 0).rpartition(":")
        if not host or not port.isdigit():
            raise ClusterError(
                f"The address of the chief needs a host and a port; got "
                f"{spec.task_address(CHIEF, 0)!r}. Give something like {_EXAMPLE}."
            )
        self.head_is_here = is_loopback(host)
        self.head_host = "127.0.0.2" if self.head_is_here else host
        self.head_port = int(port)

    @property
    def head(self) -> str:
        """The address at which the nodes find each other."""
        return f"{self.head_host}:{self.head_port}"

    def of(self, role: Role) -> str:
        """Return the host of the node of a role."""
        host = self._spec.task_address(role.job, role.index).rpartition(":")[0]
        if not is_loopback(host):
            return host
        number = roles_of(self._spec).index(role) + 3
        return f"127.0.{number // 250}.{number % 250}"


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine, by an address that no other machine can reach."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False
