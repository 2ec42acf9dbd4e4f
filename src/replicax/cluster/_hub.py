"""The first worker's service to all: it knows who is there, and collects what they agree on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any, final

from replicax.cluster._members import Members
from replicax.cluster._wire import FINISHED, MAX_BYTES, Message, configure, decode, encode, versions

_INTRODUCTION_SECONDS = 10.0  # in which somebody who connects has to say who it is


@dataclass(slots=True)
class _Seat:
    """What the hub knows of one worker."""

    writer: asyncio.StreamWriter
    heard: float
    report: Message = field(default_factory=dict)
    ended: str | None = None  # why it takes no part any more


@final
class Hub:
    """Lives in a thread of the first worker; every worker, that one too, is connected to it.

    Args:
      members: Who is expected.
      listener: Where they connect.
      coordinator: The address of JAX's own service, which they are told once all are here.
    """

    def __init__(self, members: Members, listener: socket.socket, coordinator: str) -> None:
        self._members = members
        self._listener = listener
        self._coordinator = coordinator
        self._seats: dict[int, _Seat] = {}
        self._topics: dict[str, dict[int, Any]] = {}
        self._calls: dict[int, int] | None = None  # how often each has asked whether to stop
        self._ended: list[int] = []  # in the order in which they did
        self._sockets = {listener.fileno()}
        # A child that was forked must not keep connections open when this process is gone.
        os.register_at_fork(after_in_child=self._abandon)
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="replicax-hub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the service, after what was to be said has been sent."""
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
        server = await asyncio.start_server(self._attend, sock=self._listener, limit=MAX_BYTES)
        await self._closing.wait()
        server.close()
        for seat in self._seats.values():
            seat.writer.close()
        visits = asyncio.all_tasks() - {asyncio.current_task()}
        for visit in visits:
            visit.cancel()
        await asyncio.gather(*visits, return_exceptions=True)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One worker, from its introduction to its end."""
        connection = writer.get_extra_info("socket")
        configure(connection)
        self._sockets.add(connection.fileno())
        index: int | None = None
        try:
            hello = await asyncio.wait_for(reader.readline(), _INTRODUCTION_SECONDS)
            index = self._admit(decode(hello), writer)
            while index is not None and (line := await reader.readline()).endswith(b"\n"):
                self._handle(index, decode(line))
        except (OSError, ValueError, KeyError, TypeError, TimeoutError):
            pass  # a stranger, or a worker that is gone
        except asyncio.CancelledError:
            index = None  # the hub closes
        finally:
            if index is not None:
                self._end(index, "is gone without a word: killed, crashed, or ended by os._exit")
            self._sockets.discard(connection.fileno())
            writer.close()

    def _abandon(self) -> None:
        for descriptor in self._sockets:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _admit(self, hello: Message, writer: asyncio.StreamWriter) -> int | None:
        """The worker's number, or None if it does not belong here, which it is told."""
        index, addresses = int(hello["index"]), [str(a) for a in self._members.addresses]
        problem = None
        if hello["addresses"] != addresses:
            problem = (
                f"it has the cluster {hello['addresses']}, and {self._members.names[0]} has "
                f"{addresses}. Give all workers the same cluster"
            )
        elif not 0 <= index < self._members.count:
            problem = f"there is no worker of number {index}"
        elif index in self._seats:
            problem = (
                f"another process has come as {self._members.names[index]} already. Give every "
                "process a task index of its own, and start each once"
            )
        elif hello["versions"] != versions():
            problem = (
                f"it runs {hello['versions']}, and {self._members.names[0]} {versions()}. Install "
                "the same versions everywhere"
            )
        if problem is not None:
            writer.write(encode({"kind": "refused", "reason": problem}))
            return None
        self._seats[index] = _Seat(writer, time.monotonic())
        if len(self._seats) == self._members.count:
            self._tell_all({"kind": "welcome", "coordinator": self._coordinator})
        return index

    def _handle(self, index: int, message: Message) -> None:
        seat = self._seats[index]
        seat.heard = time.monotonic()
        match message["kind"]:
            case "report":
                seat.report = message["report"]
                self._tell(index, {"kind": "beat"})
            case "put":
                self._put(index, message["topic"], message["value"])
            case "withdraw":
                values = self._topics.get(message["topic"], {})
                values.pop(index, None)
                if not values:
                    self._topics.pop(message["topic"], None)
            case "state":
                self._tell(index, {"kind": "state", "state": self._state()})
            case "finished":
                self._end(index, FINISHED, message["number"])
            case "gone":
                self._tell_all({"kind": "gone", "worker": index})
            case "failed":
                self._end(index, message["reason"])
            case "preempted":
                if self._calls is None:
                    self._calls = {}
                    self._tell_all({"kind": "deciding"})
            case "calls":
                if self._calls is not None:
                    self._calls[index] = message["calls"]
                    self._decide()

    def _put(self, index: int, topic: str, value: Any) -> None:
        values = self._topics.setdefault(topic, {})
        values[index] = value
        if len(values) == self._members.count:
            del self._topics[topic]
            ordered = [values[worker] for worker in range(self._members.count)]
            self._tell_all({"kind": "got", "topic": topic, "values": ordered})
        else:
            self._void(topic)

    def _void(self, topic: str) -> None:
        """Tells those who wait for somebody that is not going to come."""
        values = self._topics[topic]
        for worker in self._ended:
            if worker not in values:
                for waiting in values:
                    self._tell(waiting, {"kind": "void", "topic": topic, "worker": worker})
                return

    def _end(self, index: int, reason: str, number: int | None = None) -> None:
        """A worker takes no part any more; if it has finished, after so many collectives."""
        seat = self._seats[index]
        if seat.ended is not None:
            return
        seat.ended = reason
        self._ended.append(index)
        message = {"kind": "ended", "worker": index, "reason": reason, "number": number}
        self._tell_all(message)
        for topic in list(self._topics):
            self._void(topic)
        self._decide()

    def _decide(self) -> None:
        """At which of their questions all stop: the first that nobody has had an answer to."""
        here = {worker for worker, seat in self._seats.items() if seat.ended is None}
        if self._calls is not None and here and here <= self._calls.keys():
            self._tell_all({"kind": "stop", "at": max(self._calls.values()) + 1})

    def _state(self) -> Message:
        now = time.monotonic()
        workers = [
            {"silent": now - seat.heard, "report": seat.report, "ended": seat.ended}
            for _, seat in sorted(self._seats.items())
        ]
        everyone = set(range(self._members.count))
        missing = {
            topic: sorted(everyone - values.keys()) for topic, values in self._topics.items()
        }
        absent = sorted(everyone - self._seats.keys())
        return {"workers": workers, "missing": missing, "absent": absent}

    def _tell(self, index: int, message: Message) -> None:
        writer = self._seats[index].writer
        if not writer.is_closing():
            writer.write(encode(message))

    def _tell_all(self, message: Message) -> None:
        for index in self._seats:
            self._tell(index, message)
