"""The hub of the first worker, which knows the workers present and collects their values."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from replicax.cluster._members import Members
from replicax.cluster._messages import (
    FINISHED,
    AskState,
    Beat,
    Calls,
    Deciding,
    Disconnected,
    Ended,
    Failed,
    Finished,
    FromHub,
    Hello,
    Left,
    Message,
    Preempted,
    Put,
    Refused,
    Report,
    State,
    Stop,
    TakeLeave,
    TurnedAway,
    Value,
    Void,
    Welcome,
    Withdraw,
    WorkerState,
    versions,
)


@dataclass(slots=True)
class _Seat:
    """The hub's knowledge of one worker."""

    tell: Callable[[FromHub], None]
    heard: float
    report: Report | None = None
    ended: str | None = None  # why it no longer takes part


@final
class Hub:
    """The handling of each message, without connections or threads; see `HubService` for those.

    Args:
      members: The expected workers.
      coordinator: The address of JAX's own service, which workers are told once all have arrived.
    """

    def __init__(self, members: Members, coordinator: str) -> None:
        self._members = members
        self._coordinator = coordinator
        self._seats: dict[int, _Seat] = {}
        self._topics: dict[str, dict[int, str]] = {}
        self._calls: dict[int, int] | None = None  # each worker's answered questions
        self._ended: list[int] = []  # in the order in which they ended
        self._turned_away: TurnedAway | None = None  # the first one, while some workers are missing

    def admit(self, hello: Message, tell: Callable[[FromHub], None]) -> int | None:
        """Return the worker's number, or tell a stranger why it is refused and return None."""
        problem = self._problem(hello)
        if problem is not None or not isinstance(hello, Hello):
            tell(Refused(problem or ""))
            # A process that has no place even in its own cluster is not a worker.
            if isinstance(hello, Hello) and 0 <= hello.index < len(hello.addresses):
                self._note_turned_away(hello.index, problem or "")
            return None
        self._seats[hello.index] = _Seat(tell, time.monotonic())
        if len(self._seats) == self._members.count:
            self._tell_all(Welcome(self._coordinator))
        elif self._turned_away is not None:
            tell(self._turned_away)
        return hello.index

    def _note_turned_away(self, index: int, problem: str) -> None:
        """Tell waiting workers that a process they may be waiting for was refused."""
        if self._turned_away is None and len(self._seats) < self._members.count:
            known = 0 <= index < self._members.count
            who = self._members.describe(index) if known else f"number {index}"
            self._turned_away = TurnedAway(f"A process that came as {who} was refused: {problem}.")
            self._tell_all(self._turned_away)

    def _problem(self, hello: Message) -> str | None:
        if not isinstance(hello, Hello):
            return f"it began with a message of kind {type(hello).__name__}, and not with a Hello"
        addresses = tuple(str(address) for address in self._members.addresses)
        if sorted(hello.addresses) == sorted(addresses) and hello.addresses != addresses:
            return (
                f"it has the workers in the order {list(hello.addresses)}, and "
                f"{self._members.names[0]} in the order {list(addresses)}. Give all workers the "
                "same list"
            )
        if hello.addresses != addresses:
            return (
                f"it has the cluster {list(hello.addresses)}, and {self._members.names[0]} has "
                f"{list(addresses)}. Give all workers the same cluster"
            )
        if not 0 <= hello.index < self._members.count:
            return f"there is no worker of number {hello.index}"
        if hello.index in self._seats:
            return (
                f"another process has come as {self._members.names[hello.index]} already. Give "
                "every process a task index of its own, and start each once"
            )
        if hello.versions != versions():
            return (
                f"it runs {hello.versions}, and {self._members.names[0]} {versions()}. Install "
                "the same versions everywhere"
            )
        return None

    def handle(self, index: int, message: Message) -> None:
        """Handle a worker's message."""
        seat = self._seats[index]
        seat.heard = time.monotonic()
        match message:
            case Report():
                seat.report = message
                seat.tell(Beat())
            case Put():
                self._put(index, message)
            case Withdraw():
                values = self._topics.get(message.topic, {})
                values.pop(index, None)
                if not values:
                    self._topics.pop(message.topic, None)
            case AskState():
                seat.tell(self._state())
            case Finished():
                self._end(Ended(index, FINISHED, message.number))
            case Failed():
                self._end(Ended(index, message.reason, secondary=message.secondary))
            case TakeLeave():
                self._tell_all(Left(index))
            case Preempted():
                if self._calls is None:
                    self._calls = {}
                    self._tell_all(Deciding())
            case Calls():
                if self._calls is not None:
                    self._calls[index] = message.calls
                    self._decide()
            case _:
                self._end(Ended(index, f"sent a message of kind {type(message).__name__}"))

    def disconnect(self, index: int, reason: str) -> None:
        """Note that a worker's connection has ended, for `reason` unless it has given its own."""
        self._end(Ended(index, reason))
        self._tell_all(Disconnected(index))

    def _put(self, index: int, put: Put) -> None:
        values = self._topics.setdefault(put.topic, {})
        values[index] = put.value
        if len(values) == self._members.count:
            del self._topics[put.topic]
            # Values are sent one by one, because together they could exceed the limit of a message.
            for worker, value in values.items():
                for other, seat in self._seats.items():
                    if other != worker:  # A worker knows its own.
                        seat.tell(Value(put.topic, worker, value))
        else:
            self._void(put.topic)

    def _void(self, topic: str) -> None:
        """Tell the workers waiting for a topic that one ended without giving its value."""
        values = self._topics[topic]
        for worker in self._ended:
            if worker not in values:
                for waiting in values:
                    self._seats[waiting].tell(Void(topic, worker))
                return

    def _end(self, ended: Ended) -> None:
        seat = self._seats[ended.worker]
        if seat.ended is not None:
            return
        seat.ended = ended.reason
        self._ended.append(ended.worker)
        self._tell_all(ended)
        for topic in list(self._topics):
            self._void(topic)
        self._decide()

    def _decide(self) -> None:
        """Tell all at which question to stop: the first that no worker has had answered."""
        here = {worker for worker, seat in self._seats.items() if seat.ended is None}
        if self._calls is not None and here and here <= self._calls.keys():
            self._tell_all(Stop(max(self._calls.values()) + 1))

    def _state(self) -> State:
        now = time.monotonic()
        workers = tuple(
            WorkerState(now - seat.heard, seat.report, seat.ended)
            for _, seat in sorted(self._seats.items())
        )
        everyone = set(range(self._members.count))
        missing = {
            topic: tuple(sorted(everyone - values.keys())) for topic, values in self._topics.items()
        }
        return State(workers, missing, tuple(sorted(everyone - self._seats.keys())))

    def _tell_all(self, message: FromHub) -> None:
        for seat in self._seats.values():
            seat.tell(message)
