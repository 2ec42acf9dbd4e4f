"""A hub and its workers in one process: messages go through queues instead of sockets."""

from __future__ import annotations

import queue
import threading

from replicax.cluster._hub import Hub
from replicax.cluster._link import Link
from replicax.cluster._members import Address, Members
from replicax.cluster._messages import FromHub, Message, decode, encode


def members(count: int, index: int = 0) -> Members:
    names = tuple(f"worker {each}" for each in range(count))
    return Members(names, tuple(Address("10.0.0.1", 1000 + each) for each in range(count)), index)


class InMemoryConnection:
    """One worker's connection; what is sent reaches the hub before `send` returns."""

    def __init__(self, hub: Hub, lock: threading.Lock) -> None:
        self._hub = hub
        self._lock = lock
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self.index: int | None = None
        self.closed = False

    def send(self, message: Message) -> None:
        received = decode(encode(message))  # as it would arrive
        with self._lock:
            if self.closed:
                raise BrokenPipeError
            if self.index is None:
                self.index = self._hub.admit(received, self._tell)
            else:
                self._hub.handle(self.index, received)

    def receive(self) -> Message | None:
        return self._inbox.get()

    def close(self, reason: str = "is gone") -> None:
        """Disconnect, as if the process of the worker had ended."""
        with self._lock:
            if not self.closed and self.index is not None:
                self._hub.disconnect(self.index, reason)
            self.closed = True
        self._inbox.put(None)

    def _tell(self, message: FromHub) -> None:
        self._inbox.put(decode(encode(message)))


class InMemoryCluster:
    """A cluster whose `links[i]` is that of worker i; `close` it, or use it in a `with`."""

    def __init__(self, count: int) -> None:
        self.hub = Hub(members(count), "10.0.0.1:999")
        lock = threading.Lock()
        self.connections = [InMemoryConnection(self.hub, lock) for _ in range(count)]
        self.links = [
            Link(connection, members(count, index))
            for index, connection in enumerate(self.connections)
        ]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    def __enter__(self) -> InMemoryCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def nothing() -> None:
    """Do nothing; for use as a `check`."""
