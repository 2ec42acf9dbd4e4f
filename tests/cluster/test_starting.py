"""The checks of the workers' addresses on this machine, before any worker waits."""

from __future__ import annotations

import socket

import pytest

from replicax.cluster import _starting as starting
from replicax.cluster._members import Address, Members
from replicax.errors import StartFailed


@pytest.fixture
def hosts(monkeypatch):
    """Return a function that says what names mean on this machine."""

    def mean(**addresses: str) -> None:
        def resolve(host: str, port: int, **_: object) -> list[object]:
            if host not in addresses:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses[host], port))]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)

    return mean


def members(index: int, *hosts: str) -> Members:
    names = tuple(f"worker {number}" for number in range(len(hosts)))
    return Members(names, tuple(Address(host, 2222 + i) for i, host in enumerate(hosts)), index)


def test_a_name_that_only_this_machine_understands(hosts):
    hosts(a="127.0.1.1", b="192.0.2.2")
    with pytest.raises(StartFailed) as raised:
        starting.require_address(members(0, "a", "b"), 0)
    assert str(raised.value).startswith(
        "worker 0 (a:2222) is 127.0.1.1 on this machine, where no other machine can reach it, and "
        "worker 1 (b:2223) is 192.0.2.2."
    )


def test_the_first_workers_name_means_this_machine(hosts):
    hosts(a="127.0.1.1", b="127.0.0.1", c="192.0.2.3")
    with pytest.raises(StartFailed, match=r"worker 0 \(a:2222\) is 127.0.1.1 on this machine"):
        starting.require_address(members(1, "a", "b", "c"), 0)


def test_an_address_of_another_machine(hosts):
    hosts(a="127.0.0.1", b="192.0.2.1")
    with pytest.raises(StartFailed, match=r"192.0.2.1, which is not an address of this machine"):
        starting.require_address(members(1, "a", "b"), 1)


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize(
    "names", [("a", "b"), ("a", "unknown"), ("unknown", "unknown"), ("localhost", "localhost")]
)
def test_clusters_on_one_machine_and_names_that_are_not_known_yet(hosts, names, worker):
    hosts(a="127.0.0.1", b="127.0.1.1")
    starting.require_address(members(worker, *names), worker)
