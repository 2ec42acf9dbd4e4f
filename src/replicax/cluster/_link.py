"""A worker's connection to the hub."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, final

from replicax.cluster._agreed_stop import AgreedStop
from replicax.cluster._members import Members
from replicax.cluster._messages import (
    AskState,
    Deciding,
    Disconnected,
    Ended,
    Failed,
    Finished,
    Hello,
    InvalidMessage,
    Left,
    Message,
    Put,
    Refused,
    State,
    Stop,
    ToHub,
    TurnedAway,
    Value,
    Void,
    Welcome,
    Withdraw,
    versions,
)
from replicax.cluster._wire import GONE, unreachable
from replicax.errors import InvalidArgument, StartFailed, WorkerLost

_POLL_SECONDS = 0.2  # how often somebody who waits looks whether it should go on waiting


class Connection(Protocol):
    """A way to the hub and back, such as a `Wire`."""

    def send(self, message: Message) -> None:
        """Send a message; raise OSError if the other end is gone."""
        ...

    def receive(self) -> Message | None:
        """Return the next message; None when the other end is gone.

        Raises OSError if its machine cannot be reached any more.
        """
        ...


@final
class Link:
    """Sends to the hub, and keeps what comes from there; a thread receives.

    `ended` says which other workers take no part any more, and why, in the order in which that
    became known. `lost` is the one that was last needed in vain.
    """

    def __init__(self, connection: Connection, members: Members) -> None:
        self._connection = connection
        self._members = members
        self._changed = threading.Condition()
        self._coordinator: str | None = None
        self._refused: str | None = None
        self._values: dict[str, dict[int, str]] = {}  # of the topics that are waited for
        self._voids: dict[str, int] = {}
        self._left: set[int] = set()
        self._disconnected: set[int] = set()
        self._ended_before: frozenset[int] | None = None  # who had, when this worker ended
        self._heard_out = self._broken = False
        self._state: State | None = None
        self.turned_away: str | None = None  # which process was, while others waited, and why
        self.ended: dict[int, Ended] = {}
        self.lost: int | None = None
        self.ended_at = 0.0  # when the first of them was known to have
        self.heard = time.monotonic()
        self.agreed_stop = AgreedStop(self.send)
        addresses = tuple(str(address) for address in members.addresses)
        connection.send(Hello(members.index, addresses, versions()))
        threading.Thread(target=self._receive, name="replicax-link", daemon=True).start()

    def send(self, message: ToHub) -> None:
        """Tell the hub something; the thread that receives finds out if the hub is gone."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def wait_for_welcome(self, seconds: float, known: str | None = None) -> str | None:
        """Return the address of JAX's service once all workers are here; None if not in time.

        Also None, at once, if a process was turned away, unless that is `known` to the caller.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._coordinator or self._refused or self.ended or self.turned_away != known
                ),
                timeout=seconds,
            )
            if self._refused is not None:
                raise StartFailed(
                    f"{self._members.describe(self._members.index)} was turned away: "
                    f"{self._refused}."
                )
            if self.ended:
                raise StartFailed(
                    f"While the workers came together, {self.explain(next(iter(self.ended)))}"
                )
            return self._coordinator

    def exchange(self, topic: str, label: str, value: Any, check: Callable[[], None]) -> list[Any]:
        """Put down a value, and wait for those of all workers, in their order.

        Raises `WorkerLost` if one of them is not going to come, and whatever `check` raises, which
        is called now and then. `label` says what it is for.
        """
        with self._changed:
            values = self._values[topic] = {}
        try:
            try:
                self.send(Put(topic, json.dumps(value)))
            except InvalidMessage as error:
                raise InvalidArgument(
                    f"What {self._members.name} has to tell the others for {label} ({topic}) is "
                    f"too large: {error}. Names, shapes and short lists go this way; bring arrays "
                    "together with `strategy.gather` or `strategy.reduce`."
                ) from None
            with self._changed:
                while len(values) < self._members.count:
                    if topic in self._voids:
                        raise self.loss(self._voids[topic])
                    if self._broken:
                        raise self.loss(0)
                    if not self._changed.wait(_POLL_SECONDS):
                        self._check_unlocked(check)
        except BaseException:
            self.send(Withdraw(topic))
            raise
        finally:
            with self._changed:
                self._values.pop(topic, None)
                self._voids.pop(topic, None)
        return [json.loads(values[worker]) for worker in range(self._members.count)]

    def _check_unlocked(self, check: Callable[[], None]) -> None:
        """Call it without the lock: the answer it asks for comes by the thread that receives."""
        self._changed.release()
        try:
            check()
        finally:
            self._changed.acquire()

    def state(self, seconds: float) -> State | None:
        """Return what the hub knows of all workers; None if it does not answer in time."""
        with self._changed:
            self._state = None
            self.send(AskState())
            self._changed.wait_for(lambda: self._state is not None or self._broken, seconds)
            return self._state

    def say_farewell(self, message: Finished | Failed, seconds: float) -> None:
        """Tell the hub why this worker ends, and wait, so long at most, until it has heard."""
        with self._changed:
            if self._ended_before is None:
                self._ended_before = frozenset(self.ended)
        self.send(message)
        with self._changed:
            self._changed.wait_for(lambda: self._heard_out or self._broken, seconds)

    def wait_until_ended(self, workers: set[int], seconds: float) -> bool:
        """Wait so long; return whether these take no part any more, or one has been lost."""
        with self._changed:
            return self._changed.wait_for(
                lambda: workers <= self.ended.keys() or not self.all_finished, seconds
            )

    def wait_until_left(self, workers: set[int], seconds: float) -> None:
        """Wait, so long at most, until these have left JAX's service after they had finished."""
        with self._changed:
            self._changed.wait_for(lambda: workers <= self._left, seconds)

    def wait_for_loss(self, seconds: float) -> int | None:
        """Return the first worker that has ended; wait so long for the news."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.ended), seconds)
            return next(iter(self.ended), None)

    def wait_until_cause_is_gone(self, seconds: float) -> None:
        """Wait, so long at most, until the process is gone on account of which this one failed.

        That is the worker that was lost, or else one that failed by itself.
        """

        def is_gone() -> bool:
            failed = {e.worker for e in self.ended.values() if not (e.finished or e.secondary)}
            causes = {self.lost} if self.ended_after_loss else failed
            return self._broken or bool(causes & self._disconnected)

        with self._changed:
            self._changed.wait_for(is_gone, seconds)

    @property
    def ended_after_loss(self) -> bool:
        """Whether this worker has ended after the one that it had needed in vain.

        It knew of that one's end before it told its own: so two never wait for each other.
        """
        return self.lost is not None and self.lost in (self._ended_before or ())

    def loss(self, worker: int, consequence: str = "") -> WorkerLost:
        """Return the error that says that this worker has ended, and why."""
        self.lost = worker
        return WorkerLost(self.explain(worker) + consequence)

    def explain(self, worker: int) -> str:
        """Return which worker has ended, and why, as a sentence."""
        reason = self.ended[worker].reason if worker in self.ended else "has ended"
        return f"{self._members.describe(worker)} {reason}."

    @property
    def all_finished(self) -> bool:
        """Whether those who have ended have done so because there was nothing left to do."""
        return all(ended.finished for ended in self.ended.values())

    def _receive(self) -> None:
        reason = GONE
        try:
            while (message := self._connection.receive()) is not None:
                with self._changed:
                    self.heard = time.monotonic()
                    self._take(message)
                    self._changed.notify_all()
        except OSError as error:
            reason = unreachable(error)
        if self._members.index == 0:
            reason = "has lost the hub in its own process, which keeps the workers together"
        if self._refused is not None:
            reason = f"has ended the connection of {self._members.name}, which {self._refused}"
        with self._changed:  # the hub is gone, and with it the first worker
            self._broken = True
            self._note_end(Ended(0, reason))
            self._changed.notify_all()

    def _take(self, message: Message) -> None:
        match message:
            case Welcome():
                self._coordinator = message.coordinator
            case Refused():
                self._refused = message.reason
            case TurnedAway():
                self.turned_away = message.reason
            case Value() if message.topic in self._values:
                self._values[message.topic][message.worker] = message.value
            case Void() if message.topic in self._values:
                self._voids[message.topic] = message.worker
            case Ended():
                self._note_end(message)
            case Left():
                self._left.add(message.worker)
            case Disconnected():
                self._disconnected.add(message.worker)
            case State():
                self._state = message
            case Deciding():
                self.agreed_stop.answer()
            case Stop():
                self.agreed_stop.set(message.at)
            case _:
                pass  # a sign of life, or what is no longer waited for

    def _note_end(self, ended: Ended) -> None:
        if ended.worker == self._members.index and not self._broken:
            self._heard_out = True
            return
        if not self.ended:
            self.ended_at = time.monotonic()
        self.ended.setdefault(ended.worker, ended)
