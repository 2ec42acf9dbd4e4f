"""The switch between the hosts of the network tests: what its rules do to packets."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time

import pytest
from hosts import Packet, Rules, hosts

SYN, ACK = 0x02, 0x10


def packet(flags: int = SYN, port: int = 2222, protocol: int = 6, version: int = 4) -> bytes:
    addresses = socket.inet_aton("10.77.0.1") + socket.inet_aton("10.77.0.2")
    ip = struct.pack("!B8xB2x", version << 4 | 5, protocol) + addresses
    return ip + struct.pack("!HH8xBB6x", 50000, port, 5 << 4, flags)


def test_packets_are_read():
    opening = Packet("10.77.0.1", "10.77.0.2", 2222, opens=True)
    assert Packet.parse(packet()) == opening
    assert Packet.parse(packet(flags=SYN | ACK)) == Packet("10.77.0.1", "10.77.0.2", 2222)
    assert Packet.parse(packet(protocol=17)) == Packet("10.77.0.1", "10.77.0.2")
    assert Packet.parse(packet(version=6)) is None
    assert Packet.parse(b"") is None


def test_rules():
    rules, opening = Rules(), Packet("10.77.0.1", "10.77.0.2", 2222, opens=True)
    assert rules.passes(0, 1, opening)
    rules.cut.add((0, 1))
    assert not rules.passes(0, 1, opening)
    assert rules.passes(1, 0, opening)
    rules.cut_pair(1, 2)
    assert [rules.passes(*pair, opening) for pair in [(1, 2), (2, 1), (0, 2)]] == [0, 0, 1]
    rules.cut_hosts.add(2)
    assert [rules.passes(*pair, opening) for pair in [(0, 2), (2, 0), (1, 0)]] == [0, 0, 1]


def test_firewalls_stop_connections_to_other_ports():
    rules = Rules(open_ports={1: {2222}})
    assert rules.passes(0, 1, Packet("", "", 2222, opens=True))
    assert not rules.passes(0, 1, Packet("", "", 40000, opens=True))
    assert rules.passes(0, 1, Packet("", "", 40000))
    assert rules.passes(1, 0, Packet("", "", 40000, opens=True))
    rules.closed_ports[0] = {40000}
    assert not rules.passes(1, 0, Packet("", "", 40000, opens=True))
    assert rules.passes(1, 0, Packet("", "", 40001, opens=True))


def test_loss_and_delay():
    assert not Rules(loss=1.0).passes(0, 1, Packet("", ""))
    assert 0.02 <= Rules(delay_ms=20, jitter_ms=5).seconds() <= 0.025


PING = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 2222), timeout=float(sys.argv[2])) as connection:
    print(connection.recv(5).decode())
"""
PONG = """
import socket
with socket.create_server(("10.77.0.2", 2222)) as listener:
    print("ready", flush=True)
    while True:
        listener.accept()[0].send(b"hello")
"""


def test_hosts_reach_each_other_as_the_rules_say():
    with hosts(2) as two:
        server = subprocess.Popen(
            [*two.prefixes[1], sys.executable, "-c", PONG], stdout=subprocess.PIPE
        )

        def ping(seconds: float) -> str:
            command = [*two.prefixes[0], sys.executable, "-c", PING, "10.77.0.2", str(seconds)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            return done.stdout or done.stderr.splitlines()[-1]

        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            assert ping(20) == "hello\n"
            two.rules.delay_ms = 300
            started = time.monotonic()
            assert ping(20) == "hello\n"
            assert time.monotonic() - started > 0.6
            two.rules.cut_pair(0, 1)
            assert ping(0.5) == "TimeoutError: timed out"
        finally:
            server.kill()
            server.communicate(timeout=10)


def test_what_is_not_permitted_is_skipped_with_the_reason(monkeypatch):
    def refuse(command, **options):
        raise subprocess.CalledProcessError(1, command, stderr="Operation not permitted")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(pytest.skip.Exception, match="Operation not permitted"), hosts(2):
        pass
