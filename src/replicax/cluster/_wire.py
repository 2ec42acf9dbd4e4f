"""What workers say to each other besides the data: JSON objects, one a line, over TCP.

JSON, because reading it runs no code, whoever sends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from importlib import metadata
from typing import Any, final

Message = dict[str, Any]

MAX_BYTES = 16 * 1024 * 1024  # of one message
# After so many seconds without a sign of the other machine (not: the other process, which may be
# stopped while its system answers) a connection counts as broken.
UNREACHABLE_SECONDS = 15
# Why a worker takes no part any more, if there was nothing left to do.
FINISHED = "has finished its program"


def versions() -> dict[str, str]:
    """What has to be the same on all workers for their programs to be the same."""
    return {name: metadata.version(name) for name in ("replicax", "jax", "jaxlib")}


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"a message is a JSON object; got {line[:80]!r}")
    return message


def configure(connection: socket.socket) -> None:
    """Messages go at once, and a machine that cannot be reached any more is noticed."""
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


@final
class Wire:
    """One end of a connection; any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        configure(connection)
        connection.settimeout(None)
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Sends a message; raises OSError if nobody is there."""
        with self._sending:
            self._connection.sendall(encode(message))

    def receive(self) -> Message | None:
        """The next message; None when the other end is gone."""
        try:
            line = self._lines.readline(MAX_BYTES)
            return decode(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def abandon(self) -> None:
        """Closes a copy of the connection in a process that was forked; it itself goes on."""
        os.close(self._connection.detach())
