"""A connection to JAX's coordination service that goes silent instead of breaking.

The client of that service ends the whole process, with a C++ trace that does not name the culprit,
as soon as it loses the connection (JAX 0.10.2; a Python callback that could prevent this fails
while converting its argument). So if the first worker died, all others would be dead before they
could say why. Instead, they talk to the service through this relay, which lives in their own
process: once the other side has ended it keeps quiet, and the watchdog finds and reports the cause.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import final

_CHUNK_BYTES = 64 * 1024


@final
class Relay:
    """A listener on loopback that forwards to `target`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        _in_background(self._accept)

    @property
    def address(self) -> str:
        """The address on which it listens."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def close(self) -> None:
        """Accept no more connections; existing ones end with the client."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # it was closed
                return
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:  # not there yet: the client tries again
                client.close()
                continue
            server.settimeout(None)
            _in_background(lambda a=client, b=server: _serve(a, b))
            _in_background(lambda a=client, b=server: _answer(b, a))


def _serve(client: socket.socket, server: socket.socket) -> None:
    """Forward the client's messages until it ends the connection; then close both.

    Messages sent after the service has ended are dropped, so that the client does not notice.
    """
    with contextlib.suppress(OSError):
        while data := client.recv(_CHUNK_BYTES):
            with contextlib.suppress(OSError):
                server.sendall(data)
    for connection in (server, client):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads the answers
        connection.close()


def _answer(server: socket.socket, client: socket.socket) -> None:
    """Forward the service's messages; once it has ended, keep quiet."""
    with contextlib.suppress(OSError):
        while data := server.recv(_CHUNK_BYTES):
            client.sendall(data)


def _in_background(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="replicax-relay", daemon=True).start()
