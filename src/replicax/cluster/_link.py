"""A worker's connection to the hub."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, final

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

if TYPE_CHECKING:
    from replicax._typing import Json

_POLL_SECONDS = 0.2  # how often a waiting thread checks whether to keep waiting


class Connection(Protocol):
    """A two-way connection to the hub, such as a `Wire`."""

    def send(self, message: Message) -> None:
        """Send a message; raise OSError if the other end has closed."""
        ...

    def receive(self) -> Message | None:
        """Return the next message, or None once the other end has closed.

        Raises OSError if its machine can no longer be reached.
        """
        ...


@final
class Exchange:
    """A value published for a topic, pending until the values of all workers have arrived.

    An exchange must be waited for or withdrawn. A worker may have any number of them pending.
    """

    def __init__(self, link: Link, topic: str) -> None:
        self._link = link
        self.topic = topic

    @property
    def complete(self) -> bool:
        """True if the values of all workers have arrived, so that waiting takes no time."""
        return self._link.is_complete(self.topic)

    def wait(self, check: Callable[[], None]) -> list[Json]:
        """Wait for the values of all workers, and return them in worker order.

        Calls `check` periodically. Raises `WorkerLost` if one of the values will not arrive, and
        whatever `check` raises.
        """
        return self._link.collect(self.topic, check)

    def withdraw(self) -> None:
        """Stop waiting for the values."""
        self._link.withdraw(self.topic)


@final
class Link:
    """A connection to the hub that stores its messages; a thread receives them.

    `ended` says which other workers no longer take part, and why, in the order in which that became
    known. `lost` is the last of them that this worker waited for.
    """

    def __init__(self, connection: Connection, members: Members) -> None:
        self._connection = connection
        self._members = members
        self._changed = threading.Condition()
        self._coordinator: str | None = None
        self._refused: str | None = None
        self._values: dict[str, dict[int, str]] = {}  # for the topics that are awaited
        self._voids: dict[str, int] = {}
        self._left: set[int] = set()
        self._disconnected: set[int] = set()
        self._ended_before: frozenset[int] | None = None  # the workers that ended before this one
        self._heard_out = self._broken = False
        self._state: State | None = None
        self.turned_away: str | None = None  # the process, and the reason
        self.ended: dict[int, Ended] = {}
        self.lost: int | None = None
        self.ended_at = 0.0  # when the first end became known
        self.heard = time.monotonic()
        self.agreed_stop = AgreedStop(self.send)
        addresses = tuple(str(address) for address in members.addresses)
        connection.send(Hello(members.index, addresses, versions()))
        threading.Thread(target=self._receive, name="replicax-link", daemon=True).start()

    def send(self, message: ToHub) -> None:
        """Send the hub a message; the receiving thread notices if the hub has ended."""
        with contextlib.suppress(OSError):
            self._connection.send(message)

    def wait_for_welcome(self, seconds: float, known: str | None = None) -> str | None:
        """Return the address of JAX's service once all workers are here, or None if time is up.

        Returns None at once if a process was turned away, unless that is `known` to the caller.
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

    def exchange(
        self, topic: str, label: str, value: object, check: Callable[[], None]
    ) -> list[Json]:
        """Publish a value, and return the values of all workers in worker order.

        See `put` and `Exchange.wait`.
        """
        return self.put(topic, label, value).wait(check)

    def put(self, topic: str, label: str, value: object) -> Exchange:
        """Publish a value to all workers, without waiting for theirs; `label` describes it."""
        text = json.dumps(value)
        with self._changed:
            self._values[topic] = {self._members.index: text}
        try:
            self.send(Put(topic, text))
        except InvalidMessage as error:
            self._forget(topic)
            raise InvalidArgument(
                f"The message of {self._members.name} for {label} ({topic}) is too large: "
                f"{error}. Names, shapes and short lists go this way; bring arrays "
                "together with `strategy.gather` or `strategy.reduce`."
            ) from None
        return Exchange(self, topic)

    def is_complete(self, topic: str) -> bool:
        """Return whether the values of all workers have arrived."""
        return len(self._values[topic]) == self._members.count

    def collect(self, topic: str, check: Callable[[], None]) -> list[object]:
        """Wait for the values of all workers; see `Exchange.wait`."""
        try:
            with self._changed:
                values = self._values[topic]
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
            self._forget(topic)
        return [json.loads(values[worker]) for worker in range(self._members.count)]

    def withdraw(self, topic: str) -> None:
        """Give up waiting for a topic."""
        self._forget(topic)
        self.send(Withdraw(topic))

    def _forget(self, topic: str) -> None:
        with self._changed:
            self._values.pop(topic, None)
            self._voids.pop(topic, None)

    def _check_unlocked(self, check: Callable[[], None]) -> None:
        """Call `check` without the lock, which the receiving thread needs to deliver the answer."""
        self._changed.release()
        try:
            check()
        finally:
            self._changed.acquire()

    def state(self, seconds: float) -> State | None:
        """Return the hub's view of all workers, or None if it does not answer in time."""
        with self._changed:
            self._state = None
            self.send(AskState())
            self._changed.wait_for(lambda: self._state is not None or self._broken, seconds)
            return self._state

    def say_farewell(self, message: Finished | Failed, seconds: float) -> None:
        """Tell the hub why this worker ends, and wait up to `seconds` for the confirmation."""
        with self._changed:
            if self._ended_before is None:
                self._ended_before = frozenset(self.ended)
        self.send(message)
        with self._changed:
            self._changed.wait_for(lambda: self._heard_out or self._broken, seconds)

    def wait_until_ended(self, workers: set[int], seconds: float) -> bool:
        """Wait up to `seconds`; return whether `workers` have all ended, or any worker is lost."""
        with self._changed:
            return self._changed.wait_for(
                lambda: workers <= self.ended.keys() or not self.all_finished, seconds
            )

    def wait_until_left(self, workers: set[int], seconds: float) -> None:
        """Wait up to `seconds` until `workers`, which have finished, have left JAX's service."""
        with self._changed:
            self._changed.wait_for(lambda: workers <= self._left, seconds)

    def wait_for_loss(self, seconds: float) -> int | None:
        """Return the first worker that has ended, or None if none has within `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.ended), seconds)
            return next(iter(self.ended), None)

    def wait_until_cause_is_gone(self, seconds: float) -> None:
        """Wait up to `seconds` until the process that made this one fail has ended.

        That is the lost worker if there was one, otherwise any that failed on its own.
        """

        def is_gone() -> bool:
            failed = {e.worker for e in self.ended.values() if not (e.finished or e.secondary)}
            causes = {self.lost} if self.ended_after_loss else failed
            return self._broken or bool(causes & self._disconnected)

        with self._changed:
            self._changed.wait_for(is_gone, seconds)

    @property
    def ended_after_loss(self) -> bool:
        """True if this worker ended after the one that it waited for.

        It knew of that worker's end before it reported its own, so two never wait for each other.
        """
        return self.lost is not None and self.lost in (self._ended_before or ())

    def loss(self, worker: int, consequence: str = "") -> WorkerLost:
        """Return the error that says that `worker` has ended, and why."""
        self.lost = worker
        return WorkerLost(self.explain(worker) + consequence)

    def explain(self, worker: int) -> str:
        """Return a sentence that says which worker has ended, and why."""
        reason = self.ended[worker].reason if worker in self.ended else "has ended"
        return f"{self._members.describe(worker)} {reason}."

    @property
    def all_finished(self) -> bool:
        """True if the workers that have ended did so because there was nothing left to do."""
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
        with self._changed:  # the hub has ended, and with it the first worker
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
                pass  # a sign of life, or a value that is no longer awaited

    def _note_end(self, ended: Ended) -> None:
        if ended.worker == self._members.index and not self._broken:
            self._heard_out = True
            return
        if not self.ended:
            self.ended_at = time.monotonic()
        self.ended.setdefault(ended.worker, ended)
