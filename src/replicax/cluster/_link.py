"""A worker's connection to the hub."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, final

from replicax.cluster._agreed_stop import AgreedStop
from replicax.cluster._members import Members
from replicax.cluster._wire import FINISHED, Message, Wire, versions
from replicax.errors import StartFailed, WorkerLost

_POLL_SECONDS = 0.2  # how often somebody who waits looks whether it should go on waiting


@final
class Link:
    """Sends to the hub, and keeps what comes from there; a thread receives.

    `ended` says which other workers take no part any more, and why, in the order in which that
    became known.
    """

    def __init__(self, wire: Wire, members: Members) -> None:
        self._wire = wire
        self._members = members
        self._changed = threading.Condition()
        self._coordinator: str | None = None
        self._refused: str | None = None
        self._results: dict[str, list[Any]] = {}
        self._voids: dict[str, int] = {}
        self._wanted: set[str] = set()
        self._gone: set[int] = set()
        self._heard_out = self._broken = False
        self._state: Message | None = None
        self.ended: dict[int, str] = {}
        self.ended_at = 0.0  # when the first of them was known to have
        self.finished_after: dict[int, int] = {}  # how many collectives
        self.heard = time.monotonic()
        self.agreed_stop = AgreedStop(self.send)
        wire.send(
            {
                "kind": "hello",
                "index": members.index,
                "addresses": [str(address) for address in members.addresses],
                "versions": versions(),
            }
        )
        # A child that was forked must not keep the connection open when this process is gone.
        os.register_at_fork(after_in_child=wire.abandon)
        threading.Thread(target=self._receive, name="replicax-link", daemon=True).start()

    def send(self, message: Message) -> None:
        """Tells the hub something; if it is gone, that is found out by the one who receives."""
        with contextlib.suppress(OSError):
            self._wire.send(message)

    def wait_for_welcome(self, seconds: float) -> str | None:
        """The address of JAX's service, once all workers have come; None if that takes longer."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._coordinator or self._refused or self.ended, timeout=seconds
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

    def exchange(self, topic: str, value: Any, check: Callable[[], None]) -> list[Any]:
        """Puts down a value, and waits for those of all workers, in their order.

        Raises `WorkerLost` if one of them is not going to come, and whatever `check` raises, which
        is called now and then.
        """
        with self._changed:
            self._wanted.add(topic)
        try:
            self.send({"kind": "put", "topic": topic, "value": value})
            with self._changed:
                while topic not in self._results:
                    if topic in self._voids:
                        raise WorkerLost(self.explain(self._voids[topic]))
                    if self._broken:
                        raise WorkerLost(self.explain(next(iter(self.ended))))
                    if not self._changed.wait(_POLL_SECONDS):
                        self._check_unlocked(check)
                return self._results[topic]
        except BaseException:
            self.send({"kind": "withdraw", "topic": topic})
            raise
        finally:
            with self._changed:
                self._wanted.discard(topic)
                self._results.pop(topic, None)
                self._voids.pop(topic, None)

    def _check_unlocked(self, check: Callable[[], None]) -> None:
        """Without the lock, for what it has to ask may come by the thread that receives."""
        self._changed.release()
        try:
            check()
        finally:
            self._changed.acquire()

    def state(self, seconds: float) -> Message | None:
        """What the hub knows of all workers; None if it does not answer in time."""
        with self._changed:
            self._state = None
            self.send({"kind": "state"})
            self._changed.wait_for(lambda: self._state is not None or self._broken, seconds)
            return self._state

    def say_farewell(self, message: Message, seconds: float) -> None:
        """Tells the hub why this worker ends, and waits, so long at most, until it has heard."""
        self.send(message)
        with self._changed:
            self._changed.wait_for(lambda: self._heard_out or self._broken, seconds)

    def wait_until_ended(self, workers: set[int], seconds: float) -> bool:
        """Whether these take no part any more, or one of them has been lost; waits so long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: workers <= self.ended.keys() or not self.all_finished, seconds
            )

    def wait_until_gone(self, workers: set[int], seconds: float) -> None:
        """Waits, so long at most, until these have taken leave after they had finished."""
        with self._changed:
            self._changed.wait_for(lambda: workers <= self._gone, seconds)

    def wait_for_loss(self, seconds: float) -> int | None:
        """The first worker that has ended; waits so long for the news."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self.ended), seconds)
            return next(iter(self.ended), None)

    def explain(self, worker: int) -> str:
        """Which worker has ended, and why, as a sentence."""
        return f"{self._members.describe(worker)} {self.ended.get(worker, 'has ended')}."

    @property
    def all_finished(self) -> bool:
        """Whether those who have ended have done so because there was nothing left to do."""
        return all(reason == FINISHED for reason in self.ended.values())

    def _receive(self) -> None:
        while (message := self._wire.receive()) is not None:
            with self._changed:
                self.heard = time.monotonic()
                self._take(message)
                self._changed.notify_all()
        with self._changed:  # the hub is gone, and with it the first worker
            self._broken = True
            self._note_end(0, "is gone without a word: killed, crashed, or cut off")
            self._changed.notify_all()

    def _take(self, message: Message) -> None:
        match message["kind"]:
            case "welcome":
                self._coordinator = message["coordinator"]
            case "refused":
                self._refused = message["reason"]
            case "got" if message["topic"] in self._wanted:
                self._results[message["topic"]] = message["values"]
            case "void" if message["topic"] in self._wanted:
                self._voids[message["topic"]] = message["worker"]
            case "ended":
                self._note_end(message["worker"], message["reason"], message["number"])
            case "gone":
                self._gone.add(message["worker"])
            case "state":
                self._state = message["state"]
            case "deciding":
                self.agreed_stop.answer()
            case "stop":
                self.agreed_stop.set(message["at"])

    def _note_end(self, worker: int, reason: str, number: int | None = None) -> None:
        if worker == self._members.index:
            self._heard_out = True
            return
        if worker in self.ended:
            return
        if not self.ended:
            self.ended_at = time.monotonic()
        self.ended[worker] = reason
        if number is not None:
            self.finished_after[worker] = number
