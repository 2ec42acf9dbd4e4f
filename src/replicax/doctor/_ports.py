"""Checks of whether the addresses of a cluster can be used."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import final

from replicax.cluster import Members
from replicax.cluster._members import Address
from replicax.doctor._check import Check, note, ok, problem
from replicax.launch import free_ports

_ANSWER_SECONDS = 1.0
_AT_ONCE = 32  # so that a hundred machines that are down do not take a hundred seconds


def check_ports(members: Members | None, names_come_later: bool = False) -> list[Check]:
    """Check every address of a cluster; without a cluster, the addresses of this machine."""
    if members is None:
        return [_free_ports(), _own_name()]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        places = list(pool.map(_look_up, members.addresses))
        view = _View(members, places, names_come_later)
        return [*pool.map(view.check, range(members.count)), *view.check_reach()]


def _free_ports() -> Check:
    try:
        ports = free_ports(2)
    except OSError as error:
        return problem(
            "free ports",
            f"127.0.0.1 has none to give: {error}",
            "Let the loopback interface be up, and this process be allowed to listen.",
        )
    return ok("free ports", f"127.0.0.1 has some, such as {ports[0]} and {ports[1]}")


def _own_name() -> Check:
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        return note(
            "own host name",
            f"{name} does not resolve: {error}",
            "In a cluster, name this machine by its number, or add the name to /etc/hosts.",
        )
    if ipaddress.ip_address(address).is_loopback:
        return note(
            "own host name",
            f"{name} is {address}",
            "In a cluster of several machines, name this one by an address that others can reach.",
        )
    return ok("own host name", f"{name} is {address}")


@final
@dataclass(frozen=True, slots=True)
class _Place:
    """The address that a name stands for."""

    family: socket.AddressFamily
    host: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.host).is_loopback


def _look_up(address: Address) -> _Place | Exception:
    try:
        return _Place(*address.resolve())
    except OSError as error:
        return error


@final
@dataclass(frozen=True, slots=True)
class _View:
    """The addresses of the workers, as seen from this one.

    Args:
      members: The workers.
      places: The addresses that their names stand for, or the errors from looking them up.
      names_come_later: Whether names resolve only once workers have started.
    """

    members: Members
    places: Sequence[_Place | Exception]
    names_come_later: bool

    def check(self, worker: int) -> Check:
        """Check that the name resolves, then this worker's port or whether another one answers."""
        name, address = self.members.names[worker], self.members.addresses[worker]
        place = self.places[worker]
        if isinstance(place, Exception):
            found = f"the name {address.host!r} does not resolve: {place}"
            if self.names_come_later and worker != self.members.index:
                return note(name, found, "A pod gets its name when it starts.")
            return problem(
                name,
                found,
                "Correct the name, without a protocol before it; or make it known to this "
                "machine, in /etc/hosts or by its name server; or give the number of the machine.",
            )
        where = str(address) if place.host == address.host else f"{address} ({place.host})"
        if worker == self.members.index:
            return self._check_own(name, where, place)
        return _check_other(name, where, (place.host, address.port))

    def check_reach(self) -> Iterator[Check]:
        """Yield a problem if this worker has a loopback address while others do not."""
        own = self.places[self.members.index]
        known = [place for place in self.places if isinstance(place, _Place)]
        if isinstance(own, Exception) or not own.is_loopback:
            return
        if all(place.is_loopback for place in known):
            return
        yield problem(
            self.members.name,
            f"{self.members.address.host} stands for {own.host}, which no other machine can reach, "
            "and other workers are on other machines",
            "Name this machine by its address in the network. If its name is right, "
            "/etc/hosts may give it a 127.x.x.x: correct that.",
        )

    def _check_own(self, name: str, where: str, place: _Place) -> Check:
        port = self.members.address.port
        try:
            socket.create_server((place.host, port), family=place.family).close()
        except OSError as error:
            return self._check_refusal(name, where, error)
        return ok(name, f"{where}: this one; the port is free")

    def _check_refusal(self, name: str, where: str, error: OSError) -> Check:
        if error.errno == errno.EADDRNOTAVAIL:
            return problem(
                name,
                f"{where}: this one, but that is no address of this machine",
                "The task index may belong to another machine: correct it, or the address.",
            )
        # `create_server` adds the address to its message, but the report has it already.
        why = os.strerror(error.errno) if error.errno else str(error)
        found = f"{where}: this one, but it cannot listen there: {why}"
        if error.errno == errno.EADDRINUSE and self.members.index != 0:
            return note(name, found, "It need not: only the first worker listens on its port.")
        return problem(
            name,
            found,
            "If the port is in use, end the process that has it (an earlier run, perhaps), or "
            "choose another one; ports below 1024 are for root.",
        )


def _check_other(name: str, where: str, address: tuple[str, int]) -> Check:
    try:
        socket.create_connection(address, timeout=_ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return ok(name, f"{where}: the machine answers; no process listens yet")
    except OSError as error:
        return note(
            name,
            f"{where}: no answer: {error}",
            "If that machine is up, a firewall may be in between: workers need to reach each "
            "other on all ports.",
        )
    return ok(name, f"{where}: a process listens")
