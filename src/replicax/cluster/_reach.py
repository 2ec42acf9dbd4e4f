"""A test of which workers can reach which others, by connections that are closed at once."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from typing import final

from replicax.cluster._members import Address, Members
from replicax.cluster._messages import Unreached

# Long enough for the system to try several times, once per second, if the network loses packets.
_PROBE_SECONDS = 10.0
_SHOWN = 6  # failures shown in a message


@final
class Reach:
    """The ports at which the other workers must be reached, once they are known.

    Args:
      members: The processes that take part.
      timeout_seconds: How long workers wait for each other; a look takes at most half as long, so
        that no worker waiting for its result takes this one for lost.
    """

    def __init__(self, members: Members, timeout_seconds: float) -> None:
        self._members = members
        self.seconds = min(_PROBE_SECONDS, timeout_seconds / 2)
        self._addresses: dict[int, Address] = {}

    def learn(self, addresses: Iterable[str | None]) -> None:
        """Note the workers' addresses, in worker order; None for one that does not know its own."""
        self._addresses = {
            worker: Address.parse(address)
            for worker, address in enumerate(addresses)
            if address is not None and worker != self._members.index
        }

    def look(self) -> tuple[Unreached, ...]:
        """Return the workers that cannot be reached from here."""
        return unreached(self._addresses, self.seconds)

    def describe(self, failures: Iterable[tuple[int, Unreached]]) -> str:
        """Describe which worker cannot reach which; a failure comes with the worker that saw it."""
        names = self._members.names
        texts = [
            f"{self._members.describe(worker)} cannot reach {names[failure.worker]}'s port "
            f"{failure.address} ({failure.reason})"
            for worker, failure in failures
        ]
        more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
        return "; ".join(texts[:_SHOWN] + more)


def unreached(targets: Mapping[int, Address], seconds: float) -> tuple[Unreached, ...]:
    """Connect to all targets at once; return those that do not accept within `seconds`."""
    deadline = time.monotonic() + seconds
    failed: dict[int, str] = {}
    with selectors.DefaultSelector() as selector:
        try:
            for worker, address in targets.items():
                problem = _begin(selector, worker, address)
                if problem is not None:
                    failed[worker] = problem
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    connection: socket.socket = key.fileobj  # type: ignore[assignment]
                    code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if code:
                        failed[key.data] = os.strerror(code)
                    selector.unregister(connection)
                    connection.close()
        finally:
            for key in list(selector.get_map().values()):
                failed[key.data] = f"no answer for {seconds:.0f} s"
                key.fileobj.close()  # type: ignore[union-attr]
    return tuple(
        Unreached(worker, str(targets[worker]), failed[worker]) for worker in sorted(failed)
    )


def _begin(selector: selectors.BaseSelector, worker: int, address: Address) -> str | None:
    """Start to connect; return the problem if one is apparent at once."""
    try:
        family, host = address.resolve()
    except OSError as error:
        return str(error)
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    code = connection.connect_ex((host, address.port))
    if code in (0, errno.EINPROGRESS):
        selector.register(connection, selectors.EVENT_WRITE, worker)
        return None
    connection.close()
    return os.strerror(code)
