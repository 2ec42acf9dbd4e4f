"""Sockets that carry messages."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from typing import final

from replicax.cluster._forking import keep_from_children
from replicax.cluster._messages import LARGEST_LINE, InvalidMessage, Message, decode, encode

# After this many seconds without a sign of the other machine, a connection counts as broken. The
# other process does not matter: it may be stopped while its system answers.
UNREACHABLE_SECONDS = 15


def configure(connection: socket.socket) -> None:
    """Make a connection send at once, and notice when the other machine cannot be reached."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", UNREACHABLE_SECONDS * 1000),
    ):
        if hasattr(socket, option):  # Linux has all of them, other systems only some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


# Errors that mean that a network or a machine is down; others mean that a process has ended.
_CUT = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN}
)


def is_cut(error: OSError) -> bool:
    """Return whether a connection has ended because the other machine cannot be reached."""
    return error.errno in _CUT


# The end of the sentence about a worker whose process has ended without saying why.
GONE = "exited without reporting an error: killed, crashed, or ended by os._exit"


def unreachable(error: OSError) -> str:
    """Return the end of the sentence about a worker whose connection was cut."""
    return (
        f"cannot be reached any more ({error.strerror}): its machine is down, or the network "
        "between is cut"
    )


@final
class Wire:
    """One end of a connection; any thread may send, but only one receives."""

    def __init__(self, connection: socket.socket) -> None:
        configure(connection)
        keep_from_children(connection)
        connection.settimeout(None)
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message; raise OSError if the other end has closed."""
        line = encode(message)
        with self._sending:
            self._connection.sendall(line)

    def receive(self) -> Message | None:
        """Return the next message, or None once the other end has closed.

        Raises OSError if its machine can no longer be reached.
        """
        try:
            line = self._lines.readline(LARGEST_LINE)
            return decode(line) if line else None
        except InvalidMessage:
            return None
        except OSError as error:
            if is_cut(error):
                raise
            return None

    def close(self) -> None:
        """Close the connection, even while a thread is receiving."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
