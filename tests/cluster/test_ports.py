"""The ports of a process: which it may use, and on which it listens."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from replicax.cluster import _ports
from replicax.cluster._members import Address, Members
from replicax.cluster._ports import PortRange, ReservedPort, listen_within, listening_ports
from replicax.errors import ClusterError, StartFailed

HOST = "127.0.0.1"


def on_loopback() -> Members:
    return Members(("worker 0", "worker 1"), (Address(HOST, 1000), Address(HOST, 1001)), 0)


class Listening:
    """Something that listens for as long as it is there, as Gloo does."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]

    def __del__(self) -> None:
        self._listener.close()


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        yield listener


@pytest.mark.parametrize("text", ["40000-40019", " 40000 - 40019 "])
def test_a_range_of_ports(text):
    allowed = PortRange.parse(text)
    assert (allowed.first, allowed.last) == (40000, 40019)
    assert 40000 in allowed
    assert 40019 in allowed
    assert 40020 not in allowed
    assert str(allowed) == "40000-40019"


@pytest.mark.parametrize(
    "text",
    ["40000", "40019-40000", "80-90", "65000-65536", "a-b", "-1-5", "4e4-4e4", "1-2-3", "-", "٣-٤",
     "9" * 5000 + "-1"],
)  # fmt: skip
def test_what_is_no_range_is_refused_with_what_was_received(monkeypatch, text):
    monkeypatch.setenv("REPLICAX_PORTS", text)
    with pytest.raises(ClusterError, match="REPLICAX_PORTS cannot be used") as caught:
        PortRange.from_environment()
    assert repr(text)[:80] in str(caught.value)
    assert len(str(caught.value)) < 400


def test_no_range(monkeypatch):
    monkeypatch.delenv("REPLICAX_PORTS", raising=False)
    assert PortRange.from_environment() is None
    monkeypatch.setenv("REPLICAX_PORTS", "")
    assert PortRange.from_environment() is None


def test_listening_ports_are_found(taken):
    port = taken.getsockname()[1]
    with socket.create_server(
        ("::ffff:127.0.0.1", 0), family=socket.AF_INET6, dualstack_ipv6=True
    ) as mapped:
        assert {port, mapped.getsockname()[1]} <= listening_ports(HOST)
    assert port not in listening_ports("127.0.0.2")
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        assert bound.getsockname()[1] not in listening_ports(HOST)


def test_listening_ports_of_ipv6():
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with listener:
        assert listener.getsockname()[1] in listening_ports("::1")


def test_the_port_of_what_begins_to_listen_is_found():
    made, port = listen_within(Listening, HOST, None)
    assert port == made.port
    assert listen_within(lambda: "nothing", HOST, None) == ("nothing", None)


def test_it_is_made_again_until_the_port_is_in_the_range():
    made, port = listen_within(Listening, HOST, PortRange(40000, 40199))
    assert port == made.port
    assert port in PortRange(40000, 40199)


def test_a_range_that_the_system_does_not_choose_from(monkeypatch):
    monkeypatch.setattr(_ports, "_TRIES", 5)
    with pytest.raises(StartFailed, match="REPLICAX_PORTS=2000-2001 cannot be kept: Gloo"):
        listen_within(Listening, HOST, PortRange(2000, 2001))


def test_a_port_that_cannot_be_found_out(monkeypatch):
    monkeypatch.setattr(_ports, "listening_ports", lambda host: frozenset())
    with pytest.raises(StartFailed, match="does not say on which ports"):
        listen_within(lambda: None, HOST, PortRange(40000, 40199))


def test_a_reserved_port_accepts_connections_until_the_service_starts():
    reserved = ReservedPort(on_loopback(), None)
    where = (reserved.address.host, reserved.address.port)
    socket.create_connection(where, timeout=5).close()
    reserved.stop_listening()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where, timeout=5)
    with pytest.raises(OSError, match="in use"):  # nobody else gets it
        socket.create_server(where)
    with socket.create_server(where, reuse_port=True):  # but the service
        reserved.close()
        socket.create_connection(where, timeout=5).close()


def test_a_reserved_port_is_the_first_free_one_of_the_range(taken):
    port = taken.getsockname()[1]
    reserved = ReservedPort(on_loopback(), PortRange(port, port + 20))
    assert port < reserved.address.port <= port + 20
    reserved.close()
    with pytest.raises(StartFailed, match=rf"all of REPLICAX_PORTS={port}-{port} are in use"):
        ReservedPort(on_loopback(), PortRange(port, port))


def test_ports_of_several_workers_on_one_machine_are_different():
    allowed = PortRange(41000, 41010)
    first, second = (ReservedPort(on_loopback(), allowed) for _ in range(2))
    assert first.address.port != second.address.port
    first.close()
    second.close()


def test_several_workers_on_one_machine_find_ports_in_the_range_at_once():
    allowed = PortRange(42000, 42199)
    with _ports._fence(HOST, allowed):  # as another worker that looks for its own
        made, port = listen_within(Listening, HOST, allowed)
    assert port == made.port
    assert port in allowed
