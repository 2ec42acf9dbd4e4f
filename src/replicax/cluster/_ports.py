"""The ports that this process may use, and those on which it listens."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, final

from replicax.cluster._members import Address, Members
from replicax.cluster._spec import shown
from replicax.errors import ClusterError, StartFailed

PORTS_VARIABLE = "REPLICAX_PORTS"

_Listening = TypeVar("_Listening")
_LISTENING_STATE = "0A"  # in /proc/net/tcp
_LOWEST, _HIGHEST = 1024, 65535
# How many ports below the range are occupied while the system picks a library's port.
_FENCE = 256
_TRIES = 500


@final
@dataclass(frozen=True, slots=True)
class PortRange:
    """Ports that firewalls let through, from `first` to `last`."""

    first: int
    last: int

    @classmethod
    def from_environment(cls) -> PortRange | None:
        """Return the range in REPLICAX_PORTS, or None if it is not set."""
        text = os.environ.get(PORTS_VARIABLE)
        return cls.parse(text) if text else None

    @classmethod
    def parse(cls, text: str) -> PortRange:
        """Return the range described by a text such as "40000-40019".

        >>> from replicax.cluster._ports import PortRange
        >>> PortRange.parse("40000-40019")
        PortRange(first=40000, last=40019)
        """
        first, separator, last = (part.strip() for part in text.partition("-"))
        numbers = [
            int(part) if part.isascii() and part.isdigit() and len(part) <= 5 else -1
            for part in (first, last)
        ]
        if not separator or not _LOWEST <= numbers[0] <= numbers[1] <= _HIGHEST:
            raise ClusterError(
                f"The environment variable {PORTS_VARIABLE} cannot be used: it is a range of ports "
                f"between {_LOWEST} and {_HIGHEST}, such as '40000-40019'; got {shown(text)}. "
                "Correct it, or unset it."
            )
        return cls(numbers[0], numbers[1])

    def __contains__(self, port: object) -> bool:
        return isinstance(port, int) and self.first <= port <= self.last

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


@final
class ReservedPort:
    """The first worker's port for JAX's service, listened on until the service starts.

    This lets the other workers find out whether they can reach it, and keeps other processes off
    it.
    """

    def __init__(self, members: Members, allowed: PortRange | None) -> None:
        family, host = members.chief.resolve()
        with contextlib.ExitStack() as stack:  # closes the sockets on failure
            self._holder, self._listener = (
                stack.enter_context(socket.socket(family, socket.SOCK_STREAM)) for _ in range(2)
            )
            shared = [_share(each) for each in (self._holder, self._listener)]  # with the service
            _bind_within(self._holder, host, allowed, members)
            self.address = Address(host, self._holder.getsockname()[1])
            if not all(shared):
                self._holder.close()
            self._listener.bind((host, self.address.port))
            self._listener.listen(members.count)
            stack.pop_all()

    def stop_listening(self) -> None:
        """Leave connections to the service, which would otherwise get only some of them."""
        self._listener.close()

    def close(self) -> None:
        """Give up the port."""
        self._listener.close()
        self._holder.close()


def _bind_within(
    socket_: socket.socket, host: str, allowed: PortRange | None, members: Members
) -> None:
    if allowed is None:
        socket_.bind((host, 0))
        return
    for port in range(allowed.first, allowed.last + 1):
        if _is_free(host, port, socket_.family):
            with contextlib.suppress(OSError):
                socket_.bind((host, port))
                return
    raise StartFailed(
        f"{members.describe(members.index)} has no free port for JAX's service: all of "
        f"{PORTS_VARIABLE}={allowed} are in use. Give a larger range, or end the processes that "
        "have them."
    )


def _share(socket_: socket.socket) -> bool:
    """Let other sockets that ask for it share the port; return whether the system supports that."""
    if hasattr(socket, "SO_REUSEPORT"):
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return True
    return False


def _is_free(host: str, port: int, family: int) -> bool:
    """Return whether no process uses a port, not even one that would share it."""
    with socket.socket(family, socket.SOCK_STREAM) as alone:
        # Connections of a process that has ended may linger for a minute, and do not matter.
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            alone.bind((host, port))
        except OSError:
            return False
    return True


def listening_ports(host: str) -> frozenset[int]:
    """Return the ports of `host` on which this process listens; none on systems without /proc."""
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return frozenset()
    own = set()
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # it has been closed, or was that of the directory
            own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    found = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING_STATE and f"socket:[{fields[9]}]" in own:
                    address, port = fields[1].split(":")
                    if _address_of(address) == host:
                        found.add(int(port, 16))
    return frozenset(found)


def _address_of(words: str) -> str:
    """Return the address that the kernel shows as 32-bit words in its own byte order.

    >>> from replicax.cluster._ports import _address_of
    >>> _address_of("0100007F"), _address_of("0000000000000000FFFF00000100007F")
    ('127.0.0.1', '127.0.0.1')
    """
    octets = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    if octets[:12] == b"\0" * 10 + b"\xff\xff":
        octets = octets[12:]
    return socket.inet_ntop(socket.AF_INET if len(octets) == 4 else socket.AF_INET6, octets)


def listen_within(
    make: Callable[[], _Listening], host: str, allowed: PortRange | None
) -> tuple[_Listening, int | None]:
    """Make an object that listens on a port chosen by the system; return it and the port.

    The object is made again until the port is in the allowed range. None stands for a port that
    cannot be determined.
    """
    before = listening_ports(host)
    if allowed is None:
        made = make()
        return made, _only(listening_ports(host) - before)
    seen = set()
    with _fence(host, allowed):
        for _ in range(_TRIES):
            made = make()
            port = _only(listening_ports(host) - before)
            if port is None:
                raise StartFailed(
                    f"{PORTS_VARIABLE}={allowed} cannot be kept on this system, which does not say "
                    "on which ports a process listens. Unset it."
                )
            if port in allowed:
                return made, port
            seen.add(port)
            del made
    raise StartFailed(
        f"{PORTS_VARIABLE}={allowed} cannot be kept: Gloo listens on a port of the system's "
        f"choice, and {_TRIES} of them were between {min(seen)} and {max(seen)}, none in the "
        "range. Give one of 20 ports or more between these."
    )


def _only(ports: frozenset[int]) -> int | None:
    return next(iter(ports)) if len(ports) == 1 else None


@contextlib.contextmanager
def _fence(host: str, allowed: PortRange) -> Iterator[None]:
    """Occupy the ports just below a range, because Linux searches upwards from a random port.

    A search that starts at one of these ends at the first free port above, which is in the range:
    for a range of 20 ports it takes some 30 tries of 10 ms with 256 ports occupied, and some 700
    without.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        for port in range(max(_LOWEST, allowed.first - _FENCE), allowed.first):
            with contextlib.suppress(OSError):  # already taken, or no file descriptor is left
                taken = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                _share(taken)  # with other workers on this machine that may be starting
                taken.bind((host, port))
        yield
