"""The relay to JAX's service: it keeps quiet when the service is gone, and keeps nothing open."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from replicax.cluster._relay import Relay


@pytest.fixture
def service():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        yield listener


@pytest.fixture
def relay(service):
    relay = Relay(service.getsockname())
    yield relay
    relay.close()


def connect(relay: Relay, service: socket.socket) -> tuple[socket.socket, socket.socket]:
    host, _, port = relay.address.rpartition(":")
    client = socket.create_connection((host, int(port)), timeout=10)
    server, _ = service.accept()
    server.settimeout(10)
    return client, server


def test_what_is_said_is_passed_on_both_ways(relay, service):
    client, server = connect(relay, service)
    with client, server:
        client.sendall(b"question")
        assert server.recv(100) == b"question"
        server.sendall(b"answer")
        assert client.recv(100) == b"answer"


def test_a_service_that_is_gone_is_not_noticed(relay, service):
    client, server = connect(relay, service)
    with client:
        server.close()
        client.settimeout(0.05)
        for _ in range(5):
            client.sendall(b"question")  # also when the other side has reset the connection
            with pytest.raises(TimeoutError):
                client.recv(1)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
@pytest.mark.parametrize("first", ["client", "service"])
def test_connections_that_have_ended_are_closed(relay, service, first):
    before = descriptors()
    for _ in range(10):
        client, server = connect(relay, service)
        if first == "service":
            server.close()
        client.close()
        if first == "client":
            assert server.recv(1) == b""  # the service is told
            server.close()
    deadline = time.monotonic() + 10
    while descriptors() > before:
        assert time.monotonic() < deadline, f"{descriptors() - before} descriptors are left"
        time.sleep(0.01)
