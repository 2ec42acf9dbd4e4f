"""Hosts on one machine: network namespaces, and a switch between them whose rules can change.

Each host has a TUN device, whose packets the switch reads and passes on in a thread of the test's
process. So delay, loss, cut cables and closed ports need nothing from the kernel but TUN.
"""

from __future__ import annotations

import contextlib
import heapq
import ipaddress
import itertools
import json
import os
import random
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from workers import Workers, running

PORT = 2222  # of every worker, in TF_CONFIG

_LARGEST_PACKET = 65536
_TCP = 6
_OPEN_TUN = """
import fcntl, os, socket, struct, sys
tun = os.open("/dev/net/tun", os.O_RDWR)
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", b"tun0", IFF_TUN | IFF_NO_PI))
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"tun"], [tun])
"""


@dataclass(frozen=True)
class Packet:
    """The parts of an IPv4 packet that rules depend on; `opens` a connection to `port`."""

    source: str
    destination: str
    port: int | None = None
    opens: bool = False

    @classmethod
    def parse(cls, data: bytes) -> Packet | None:
        """Return the packet; None if it is not IPv4."""
        if len(data) < 20 or data[0] >> 4 != 4:
            return None
        source, destination = (str(ipaddress.IPv4Address(data[at : at + 4])) for at in (12, 16))
        start = (data[0] & 15) * 4
        if data[9] != _TCP or len(data) < start + 14:
            return cls(source, destination)
        (port,) = struct.unpack_from("!H", data, start + 2)
        return cls(source, destination, port, opens=data[start + 13] & 0x12 == 0x02)


@dataclass
class Rules:
    """The rules for packets. Each attribute may be changed while the switch runs.

    Args:
      delay_ms: The delay of a packet.
      jitter_ms: The largest additional delay, at random.
      loss: The share of packets that get lost, at random.
      cut: Pairs (from, to) of hosts between which nothing passes in this direction.
      cut_hosts: Hosts from and to which nothing passes.
      open_ports: For hosts behind a firewall, the ports to which others may connect. Packets of
        connections that the host has opened itself, or that are already open, pass.
      closed_ports: For other hosts, the ports to which others may not connect.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    cut: set[tuple[int, int]] = field(default_factory=set)
    cut_hosts: set[int] = field(default_factory=set)
    open_ports: dict[int, set[int]] = field(default_factory=dict)
    closed_ports: dict[int, set[int]] = field(default_factory=dict)

    def cut_pair(self, first: int, second: int) -> None:
        self.cut |= {(first, second), (second, first)}

    def passes(self, source: int, destination: int, packet: Packet) -> bool:
        if (source, destination) in self.cut or {source, destination} & self.cut_hosts:
            return False
        if random.random() < self.loss:
            return False
        if not packet.opens:
            return True
        allowed = self.open_ports.get(destination)
        closed = self.closed_ports.get(destination, set())
        return (allowed is None or packet.port in allowed) and packet.port not in closed

    def seconds(self) -> float:
        return (self.delay_ms + random.random() * self.jitter_ms) / 1000


class Switch:
    """A thread that forwards packets between TUN devices, by destination."""

    def __init__(self, devices: dict[str, int], rules: Rules) -> None:
        self._devices = devices
        self._numbers = {address: number for number, address in enumerate(devices)}
        self._rules = rules
        self._under_way: list[tuple[float, int, str, bytes]] = []
        self._order = itertools.count()
        self._wake, self._woken = os.pipe()
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.close(self._woken)
        self._thread.join(10)
        os.close(self._wake)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for descriptor in (*self._devices.values(), self._wake):
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                next_at = self._under_way[0][0] if self._under_way else None
                timeout = None if next_at is None else max(0.0, next_at - time.monotonic())
                ready = [key.fd for key, _ in selector.select(timeout)]
                if self._wake in ready:
                    return
                for descriptor in ready:
                    self._take(os.read(descriptor, _LARGEST_PACKET))
                self._deliver()

    def _take(self, data: bytes) -> None:
        packet = Packet.parse(data)
        if packet is None or not {packet.source, packet.destination} <= self._numbers.keys():
            return
        source, destination = (self._numbers[x] for x in (packet.source, packet.destination))
        if self._rules.passes(source, destination, packet):
            due = time.monotonic() + self._rules.seconds()
            heapq.heappush(self._under_way, (due, next(self._order), packet.destination, data))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, destination, data = heapq.heappop(self._under_way)
            with contextlib.suppress(OSError):  # the device is down
                os.write(self._devices[destination], data)


@dataclass(frozen=True)
class Hosts:
    """Connected hosts: `prefixes[i]` starts a program on host i."""

    addresses: list[str]
    prefixes: list[list[str]]
    rules: Rules

    def run(
        self,
        arguments: Sequence[str],
        told: Sequence[Sequence[str]] | None = None,
        **environment: str,
    ) -> AbstractContextManager[Workers]:
        """Start Python with `arguments` as a worker on each host.

        `told` are the addresses, or names, that each host is told; by default the right ones.
        """
        configs = []
        for index, addresses in enumerate(told or [self.addresses] * len(self.addresses)):
            cluster = {"worker": [f"{address}:{PORT}" for address in addresses]}
            task = {"type": "worker", "index": index}
            configs.append({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})
        return running(
            arguments, cluster=[{**each, **environment} for each in configs], prefix=self.prefixes
        )


@contextlib.contextmanager
def hosts(count: int, names: Sequence[dict[str, str]] = ()) -> Iterator[Hosts]:
    """Make hosts; skip the test where that is not permitted.

    `names` are the names that each of them has in its /etc/hosts, with their addresses.
    """
    if shutil.which("ip") is None:
        pytest.skip("needs `ip` (Debian: iproute2)")
    if not os.path.exists("/dev/net/tun"):
        pytest.skip("needs /dev/net/tun")
    namespaces = [f"replicax{os.getpid()}-{host}" for host in range(count)]
    addresses = [f"10.77.0.{host + 1}" for host in range(count)]
    rules = Rules()
    with contextlib.ExitStack() as stack:
        devices = {}
        for namespace, address in zip(namespaces, addresses, strict=True):
            try:
                _ip("netns", "add", namespace)
                stack.callback(_ip, "netns", "delete", namespace)
                devices[address] = _open_tun(namespace)
            except subprocess.CalledProcessError as error:
                pytest.skip(
                    "network namespaces with TUN devices are not permitted here: "
                    f"{error.stderr.strip().splitlines()[-1]}"
                )
            stack.callback(os.close, devices[address])
        for namespace, known in zip(namespaces, names, strict=False):
            folder = Path("/etc/netns") / namespace  # which `ip netns exec` lays over /etc
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder)
            lines = [f"{address} {name}\n" for name, address in known.items()]
            (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))
        for namespace, address in zip(namespaces, addresses, strict=True):
            _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "tun0")
            _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", namespace, "link", "set", "tun0", "up")
        stack.callback(Switch(devices, rules).close)
        prefixes = [["ip", "netns", "exec", namespace] for namespace in namespaces]
        yield Hosts(addresses, prefixes, rules)


def _open_tun(namespace: str) -> int:
    """Return the descriptor of a new TUN device in a namespace."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        subprocess.run(
            ["ip", "netns", "exec", namespace, sys.executable, "-c", _OPEN_TUN,
             str(theirs.fileno())],
            pass_fds=[theirs.fileno()], check=True, capture_output=True, text=True, timeout=20,
        )  # fmt: skip
        return socket.recv_fds(ours, 16, 1)[1][0]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)
