"""The connections of the hub, in a thread of the first worker."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any, final

from replicax.cluster._forking import hold_until_exit, keep_from_children
from replicax.cluster._hub import Hub
from replicax.cluster._messages import (
    LARGEST_LINE,
    FromHub,
    Refused,
    decode,
    encode,
)
from replicax.cluster._wire import GONE, configure, is_cut, unreachable

_INTRODUCTION_SECONDS = 10.0  # how long a new connection may take to introduce itself


@final
class HubService:
    """A thread that serves the hub to every worker, including the first.

    Connections of workers end with this process, even if the service is closed earlier.

    Args:
      hub: The hub to serve.
      listener: The socket to which workers connect.
    """

    def __init__(self, hub: Hub, listener: socket.socket) -> None:
        self._hub = hub
        self._listener = listener
        self._connections: list[Any] = []  # one per worker
        keep_from_children(listener)
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="replicax-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the service, after pending messages have been sent."""
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(5)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._attend, sock=self._listener, limit=LARGEST_LINE)
        await self._closing.wait()
        server.close()
        for connection in self._connections:
            hold_until_exit(connection)
        visits = asyncio.all_tasks() - {asyncio.current_task()}
        for visit in visits:
            visit.cancel()
        await asyncio.gather(*visits, return_exceptions=True)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one worker, from its introduction to its end."""
        connection = writer.get_extra_info("socket")
        configure(connection)
        keep_from_children(connection)

        def tell(message: FromHub) -> None:
            if not writer.is_closing():
                writer.write(encode(message))

        index, reason = None, GONE
        try:
            hello = await asyncio.wait_for(reader.readline(), _INTRODUCTION_SECONDS)
            index = self._hub.admit(decode(hello), tell)
            if index is not None:
                self._connections.append(connection)
            while index is not None and (line := await reader.readline()).endswith(b"\n"):
                self._hub.handle(index, decode(line))
        except ValueError as error:  # not a message, or a line without an end
            reason = f"sent what is no message: {error}"
            tell(Refused(reason))
        except OSError as error:  # includes the timeout of a stranger that says nothing
            if is_cut(error):
                reason = unreachable(error)
        except asyncio.CancelledError:
            index = None  # the hub is closing
        finally:
            if index is not None:
                self._hub.disconnect(index, reason)
            writer.close()
