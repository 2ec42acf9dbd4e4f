"""Sockets that carry messages."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from typing import final

from replicax.cluster._forking import keep_from_children
from replicax.cluster._messages import LARGEST_LINE, InvalidMessage, Message, decode, encode

# After so many seconds without a sign of the other machine (not: the other process, which may be
# stopped while its system answers) a connection counts as broken.
UNREACHABLE_SECONDS = 15


def configure(connection: socket.socket) -> None:
    """Send messages at once, and notice a machine that cannot be reached any more."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", UNREACHABLE_SECONDS * 1000),
    ):
        if hasattr(socket, option):  # Linux has all of them, others some
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


# The errors of a network, or of a machine that is down; others are of a process that has ended.
_CUT = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN}
)


def is_cut(error: OSError) -> bool:
    """Return whether a connection has ended because the other machine cannot be reached."""
    return error.errno in _CUT


# What is said, after its name, of a worker whose process has ended and has not said why.
GONE = "exited without reporting an error: killed, crashed, or ended by os._exit"


def unreachable(error: OSError) -> str:
    """Return the end of the sentence about a worker whose connection was cut."""
    return (
        f"cannot be reached any more ({error.strerror}): its machine is down, or the network "
        "between is cut"
    )


@final
class Wire:
    """One end of a connection; any thread may send, one receives."""

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
        """Return the next message; None when the other end has closed.

        Raises OSError if its machine cannot be reached any more.
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
        """Close the connection, also for the receiving thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
