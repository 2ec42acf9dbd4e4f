"""The workers that take part in synchronous training, in order."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from replicax.cluster._spec import shown
from replicax.errors import ClusterError

if TYPE_CHECKING:
    from replicax.cluster.resolvers._resolver import ClusterResolver

# The jobs whose tasks train, in the order of their process ids. Evaluators run alone, and
# parameter servers do not train.
_TRAINING_JOBS = ("chief", "master", "worker")


@final
@dataclass(frozen=True, slots=True)
class Address:
    """The address of a worker."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        host, separator, port = text.rpartition(":")
        try:
            host.encode("idna")  # as the system does when it looks up the name
            valid = bool(separator and host and port.isdecimal() and 0 < int(port) < 65536)
        except ValueError:  # a UnicodeError, or a number with thousands of digits
            valid = False
        if not valid:
            raise ClusterError(
                f"The address of a worker is host:port; got {shown(text)} in the cluster "
                "specification."
            )
        return cls(host.strip("[]"), int(port))

    def resolve(self) -> tuple[socket.AddressFamily, str]:
        """Return the numeric address of the host; raise OSError if the name does not resolve."""
        if self.host == "localhost":  # It may mean ::1 to some and 127.0.0.1 to others.
            return socket.AF_INET, "127.0.0.1"
        family, _, _, _, name = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        return socket.AddressFamily(family), str(name[0])

    def resolved(self) -> str | None:
        """Return the numeric address of the host, or None if its name does not resolve (yet)."""
        try:
            return self.resolve()[1]
        except OSError:
            return None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@final
@dataclass(frozen=True, slots=True)
class Members:
    """The workers of a cluster in the order of their process ids, and the index of this one."""

    names: tuple[str, ...]
    addresses: tuple[Address, ...]
    index: int

    @classmethod
    def of(cls, resolver: ClusterResolver) -> Members | None:
        """Return the workers that `resolver` names, or None if this process is on its own."""
        spec = resolver.cluster_spec()
        tasks = [
            (job, task, spec.task_address(job, task))
            for job in _TRAINING_JOBS
            if job in spec.jobs
            for task in spec.task_indices(job)
        ]
        kind, number = resolver.task_type, resolver.task_id
        if kind == "evaluator" or not tasks or (len(tasks) == 1 and kind is None):
            return None
        names = tuple(f"{job} {task}" for job, task, _ in tasks)
        if kind is None or number is None:
            raise ClusterError(
                f"The cluster has {len(tasks)} workers ({', '.join(names)}), but it is not said "
                f"which of them this process is: task type {kind!r}, task index {number!r}. Set "
                '"task": {"type": "worker", "index": 0} in TF_CONFIG, with the index of each.'
            )
        if kind not in _TRAINING_JOBS:
            raise ClusterError(
                f"A task of type {kind!r} takes no part in training by all workers together. Use "
                f"this strategy in the tasks {', '.join(names)}."
            )
        own = f"{kind} {int(number)}"
        if own not in names:
            raise ClusterError(
                f"This process is {own!r}, which the cluster does not have: there are "
                f"{', '.join(names)}. Task indices start at 0; correct the index, or the addresses."
            )
        if len(tasks) == 1:
            return None
        addresses = tuple(Address.parse(address) for _, _, address in tasks)
        for address in set(addresses):
            same = [name for name, other in zip(names, addresses, strict=True) if other == address]
            if len(same) > 1:
                raise ClusterError(
                    f"{' and '.join(same)} have the same address, {address}. Give every worker a "
                    "port of its own."
                )
        return cls(names, addresses, names.index(own))

    @property
    def count(self) -> int:
        return len(self.names)

    @property
    def name(self) -> str:
        """The name of this process."""
        return self.names[self.index]

    @property
    def address(self) -> Address:
        """The address of this process."""
        return self.addresses[self.index]

    @property
    def chief(self) -> Address:
        """The address of the first worker, to which the others connect."""
        return self.addresses[0]

    def describe(self, index: int) -> str:
        """Describe a worker for messages, as in "worker 1 (10.0.0.2:2222)"."""
        return f"{self.names[index]} ({self.addresses[index]})"
