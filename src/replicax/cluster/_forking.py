"""Connections that end when this process does: no earlier, and no later because of its children.

The end of a connection is how other workers learn that a process has ended. A forked child has
copies of its descriptors, and would keep the connections open.
"""

from __future__ import annotations

import contextlib
import os
from typing import Protocol, final


class Connection(Protocol):
    """A socket, or a stand-in."""

    def fileno(self) -> int:
        """Return the descriptor, or -1 once it is closed."""
        ...


@final
class _Held:
    """A descriptor that stays open as long as the process lives."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor


# Objects rather than numbers, because a number may be reused once its connection is closed.
_connections: list[Connection] = []


def keep_from_children(connection: Connection) -> None:
    """Make children that are forked from now on give up their copy of a connection."""
    _connections[:] = [each for each in _connections if each.fileno() >= 0]
    _connections.append(connection)


def hold_until_exit(connection: Connection) -> None:
    """Keep a connection open until the process ends, even when the object is closed.

    The interpreter closes its objects some time before the process ends, so that another worker
    that waits for this one could end first.
    """
    if connection.fileno() >= 0:
        keep_from_children(_Held(os.dup(connection.fileno())))


def _give_up_copies() -> None:
    """Replace each connection with the null device.

    Closing the descriptors would free their numbers for the child's own files, which the connection
    objects would then close when they are collected.
    """
    # If no descriptor is available, keeping the copies is better than a child that dies.
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        for connection in _connections:
            if connection.fileno() >= 0:
                os.dup2(null, connection.fileno(), inheritable=False)
        os.close(null)
    _connections.clear()  # a child of this child has nothing to give up


os.register_at_fork(after_in_child=_give_up_copies)
