"""The hub behind real sockets: strangers are told why they are turned away, and disturb nobody."""

from __future__ import annotations

import json
import socket
import time

import pytest
from in_memory_cluster import members, nothing

from replicax.cluster._hub import Hub
from replicax.cluster._hub_service import HubService
from replicax.cluster._link import Link
from replicax.cluster._messages import LARGEST_LINE, Hello, Message, versions
from replicax.cluster._wire import Wire
from replicax.errors import WorkerLost


@pytest.fixture
def listener():
    """The address of a hub that expects two workers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        service = HubService(Hub(members(2), "10.0.0.1:999"), listener)
        yield listener
        service.close()


def connect(listener: socket.socket) -> socket.socket:
    connection = socket.create_connection(listener.getsockname())
    connection.settimeout(10)
    return connection


def read(connection: socket.socket) -> list[dict[str, str]]:
    """Return the hub's messages until it closes the connection."""
    data = b""
    while chunk := connection.recv(65536):
        data += chunk
    return [json.loads(line) for line in data.splitlines()]


def hello(**fields: str) -> bytes:
    usual = {
        "kind": '"Hello"',
        "index": "1",
        "addresses": json.dumps([str(address) for address in members(2).addresses]),
        "versions": json.dumps(versions()),
    }
    content = ", ".join(f'"{name}": {value}' for name, value in {**usual, **fields}.items())
    return b"{%s}\n" % content.encode()


STRANGERS = {
    "http": (b"GET / HTTP/1.1\r\n", "no JSON"),
    "infinity": (hello(index="Infinity"), "Infinity is no number"),
    "overflow": (hello(index="1e999"), "index must be int"),
    "digits": (hello(index="1" * 5000), "4300 digits"),
    "deep": (hello(versions="[" * 100_000), "nested too deeply"),
    "deep, and whole": (hello(addresses="[" * 900 + "]" * 900), "addresses must be str"),
    "type": (hello(addresses="3"), "addresses must be tuple"),
    "index": (hello(index="-1"), "no worker of number -1"),
    "no introduction": (b'{"kind": "Preempted"}\n', "not with a Hello"),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_are_refused_with_a_reason_and_disturb_nobody(listener, stranger):
    line, reason = STRANGERS[stranger]
    wires = [Wire(connect(listener)) for _ in range(2)]
    first = Link(wires[0], members(2, 0))
    with connect(listener) as connection:
        connection.sendall(line)
        (refused,) = read(connection)
    assert refused["kind"] == "Refused"
    assert reason in refused["reason"]
    second = Link(wires[1], members(2, 1))
    assert first.wait_for_welcome(5) == second.wait_for_welcome(5) == "10.0.0.1:999"
    for wire in wires:
        wire.close()


def test_a_line_without_an_end_is_refused(listener):
    with connect(listener) as connection:
        connection.sendall(b"x" * (LARGEST_LINE + 1))
        (refused,) = read(connection)
    assert "limit" in refused["reason"]


def test_a_worker_that_says_what_is_no_message_is_named_with_the_reason(listener):
    first_wire, second_wire = Wire(connect(listener)), Wire(connect(listener))
    first = Link(first_wire, members(2, 0))
    second = Link(second_wire, members(2, 1))
    assert second.wait_for_welcome(5)
    second_wire._connection.sendall(b'{"kind": "Calls", "calls": Infinity}\n')
    with pytest.raises(WorkerLost, match=r"worker 1 \(.*no message: .*Infinity"):
        first.exchange("topic", "a test", 1, nothing)
    with pytest.raises(WorkerLost, match="ended the connection of worker 1, which sent what is no"):
        second.exchange("topic", "a test", 1, nothing)
    first_wire.close()
    second_wire.close()


def test_connections_outlive_the_service_until_the_process_ends():
    listener = socket.create_server(("127.0.0.1", 0))
    service = HubService(Hub(members(1), "10.0.0.1:999"), listener)
    worker, stranger = connect(listener), connect(listener)
    wire = Wire(worker)
    wire.send(Hello(0, ("10.0.0.1:1000",), versions()))
    message: Message | None = wire.receive()
    assert message is not None
    service.close()
    assert stranger.recv(1) == b""  # the end
    worker.settimeout(0.05)
    with pytest.raises(TimeoutError):
        worker.recv(1)
    begun = time.monotonic()
    service.close()  # again, which is nothing
    assert time.monotonic() - begun < 1
    wire.close()
    stranger.close()
