"""A connection to JAX's coordination service that goes silent instead of breaking.

The client of that service ends the whole process, with a trace of C++ and no word of who is to
blame, in the moment in which it loses the connection (JAX 0.10.2; a callback in Python that could
prevent it fails in converting its argument). So when the first worker dies, all others would be
dead before they can say why. They talk to the service through this relay, which lives in their
own process: when the other side is gone it keeps quiet, and what has happened is found out and
said by the watchdog.
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
    """Listens on loopback, and passes on what comes to `target`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []  # kept: a socket that is collected is closed
        _in_background(self._accept)

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            try:
                server = socket.create_connection(self._target, timeout=10)
            except OSError:  # not there yet: the client tries again
                client.close()
                continue
            server.settimeout(None)
            self._open += [client, server]
            _in_background(lambda a=client, b=server: _pump(a, b, end_with_source=True))
            _in_background(lambda a=client, b=server: _pump(b, a, end_with_source=False))


def _pump(source: socket.socket, sink: socket.socket, *, end_with_source: bool) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            sink.sendall(data)
    if end_with_source:
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def _in_background(function: Callable[[], None]) -> None:
    threading.Thread(target=function, name="replicax-relay", daemon=True).start()
