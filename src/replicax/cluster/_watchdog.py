"""The watchdog, which names the worker to blame when another waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NoReturn, final

from replicax.cluster._link import Link
from replicax.cluster._members import Members
from replicax.cluster._messages import Look, State, Unreached, WorkerState
from replicax.cluster._progress import Progress, Waiting
from replicax.cluster._reach import Reach
from replicax.errors import WorkerLost

_REPORT_SECONDS = 1.0
# How long a collective may continue after a worker has ended, which may have done its part.
_GRACE_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
# A worker that has not reported for this long is stopped, or its machine is.
_SILENT_SECONDS = 3.0
# How much longer than its own look a worker waits for the results of the others.
_LATE_SECONDS = 3.0


@final
class Watchdog:
    """A thread that reports this worker's activity, and judges whether its wait is hopeless.

    Args:
      members: The processes that take part.
      link: The connection to the hub.
      progress: The activity of this worker.
      timeout_seconds: How long to wait for a worker that is alive.
      reach: Finds out which workers this one can reach.
    """

    def __init__(
        self,
        members: Members,
        link: Link,
        progress: Progress,
        timeout_seconds: float,
        reach: Reach,
    ) -> None:
        self._members = members
        self._link = link
        self._progress = progress
        self._timeout = timeout_seconds
        self._reach = reach
        self._closed = threading.Event()
        self._judged = 0.0  # when all were last found to be at work
        self._looking: int | None = None  # the collective in which workers test who reaches whom
        self._looking_since = 0.0
        self._round = 0  # how often they have tested that in the same collective
        threading.Thread(target=self._watch, name="replicax-watchdog", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def check(self, waiting: Waiting) -> bool:
        """Raise `WorkerLost` if the awaited value will not arrive.

        Returns True if it was found just now, after `timeout_seconds`, that no worker is to blame.
        """
        now = time.monotonic()
        lost = self._lost(waiting)
        if lost and now - max(waiting.since, self._link.ended_at) > _GRACE_SECONDS:
            self.raise_loss(waiting.label, lost)
        if now - max(waiting.since, self._judged) <= self._timeout:
            return False
        if self._looking != self._progress.number:
            diagnosis = self._diagnosis(waiting)
            if diagnosis is not None:
                raise WorkerLost(diagnosis)
        if waiting.topic is None:  # a value with a topic arrives through the hub
            unreached = self._unreached()
            if unreached is None:
                return False
            self._require_reach(waiting, unreached)
        self._judged = time.monotonic()
        return True

    def look_around(self, waiting: Waiting, cause: BaseException) -> None:
        """Raise `WorkerLost` if some workers cannot reach each other, which may explain `cause`."""
        while (unreached := self._unreached()) is None:
            time.sleep(_REPORT_SECONDS / 4)
        self._require_reach(waiting, unreached, cause)

    def require_all(self, waiting: Waiting) -> None:
        """Raise `WorkerLost` if a worker that the next operation needs has ended."""
        lost = self._lost(waiting)
        if lost:
            self.raise_loss(waiting.label, lost)

    def _lost(self, waiting: Waiting) -> list[int]:
        """Return the workers that ended before doing their part in the awaited operation.

        A worker that finished after the program with the current number has done its part in it, if
        the program communicates at all. It cannot have gathered values without this worker.
        """
        return [
            ended.worker
            for ended in list(self._link.ended.values())
            if waiting.topic is not None
            or ended.finished_after is None
            or ended.finished_after < self._progress.number
        ]

    def raise_loss(
        self, label: str, workers: Sequence[int], cause: BaseException | None = None
    ) -> NoReturn:
        """Raise `WorkerLost` for the worker among these that is most likely the cause.

        A worker that failed on its own takes precedence over one that finished, and both over one
        that failed only because it needed another; among equals, the first one counts.
        """
        ended = self._link.ended
        worker = min(workers, key=lambda each: (ended[each].secondary, ended[each].finished))
        raise self._link.loss(
            worker,
            f" {self._members.name} needs it for {label} (collective {self._progress.number}).",
        ) from cause

    def _watch(self) -> None:
        while True:
            self._link.send(self._progress.report())
            if self._closed.wait(_REPORT_SECONDS):
                return

    def _unreached(self) -> Sequence[tuple[int, Unreached]] | None:
        """Return which workers cannot reach which others, or None until that is known.

        Every worker that has waited too long looks for itself, and reports what it finds.
        """
        number = self._progress.number
        if self._looking != number:
            self._looking, self._looking_since = number, time.monotonic()
            last = self._progress.look
            self._round = last.round + 1 if last is not None and last.number == number else 1
            threading.Thread(
                target=self._look, args=[number, self._round], name="replicax-look", daemon=True
            ).start()
            return None
        state = self._link.state(_ANSWER_SECONDS)
        known = () if state is None else state.workers
        looks = {
            worker: look
            for worker, each in enumerate(known)
            if each.report is not None and (look := each.report.look) is not None
            if look.number == number and look.round >= self._round
        }
        late = time.monotonic() - self._looking_since > self._reach.seconds + _LATE_SECONDS
        ended = self._link.ended  # these have finished, and so done their part for others
        if len(looks.keys() | ended.keys()) < self._members.count and not late:
            return None
        self._looking = None
        return [
            (worker, each)
            for worker, look in looks.items()
            for each in look.unreached
            # A worker that has looked too was there; it may have ended since, for the same reason.
            if each.worker in looks or each.worker not in ended
        ]

    def _look(self, number: int, round_: int) -> None:
        self._progress.look = Look(number, round_, self._reach.look())
        self._link.send(self._progress.report())

    def _require_reach(
        self,
        waiting: Waiting,
        unreached: Sequence[tuple[int, Unreached]],
        cause: BaseException | None = None,
    ) -> None:
        if unreached:
            if self._members.index == 0:
                time.sleep(_REPORT_SECONDS)  # the others still need this worker's hub
            seconds = time.monotonic() - waiting.since
            raise WorkerLost(
                f"{self._members.name} has waited {seconds:.0f} s in {waiting.label} (collective "
                f"{self._progress.number}), and some workers do not reach each other: "
                f"{self._reach.describe(unreached)}. Look at the network between them."
            ) from cause

    def _diagnosis(self, waiting: Waiting) -> str | None:
        """Describe the culprits and the activity of all workers; return None if all do the same."""
        state = self._link.state(_ANSWER_SECONDS)
        if state is not None and self._culprits(waiting, state):
            # The hub's state is up to a second old: a worker may have arrived in the meantime.
            time.sleep(1.5 * _REPORT_SECONDS)
            state = self._link.state(_ANSWER_SECONDS)
        if state is None and self._link.ended:
            # The first worker has just given up too, and has reported why it ends.
            self.raise_loss(waiting.label, list(self._link.ended))
        culprits = [0] if state is None else self._culprits(waiting, state)
        if not culprits:
            return None
        seconds = time.monotonic() - waiting.since
        names = " and ".join(self._members.describe(worker) for worker in culprits)
        lines = [
            f"{self._members.name} has waited {seconds:.0f} s in {waiting.label} "
            f"(collective {self._progress.number}) for {names}."
        ]
        if state is None:
            silent = time.monotonic() - self._link.heard
            lines.append(
                f"  {self._members.names[0]}: has not been heard of for {silent:.0f} s: it is "
                "stopped, or its machine or the network is."
            )
        else:
            lines += [f"  {self._describe(*known)}" for known in enumerate(state.workers)]
        lines.append(
            "If a worker may take that long, raise `timeout_seconds` of the "
            "`rx.experimental.CommunicationOptions` given to the strategy."
        )
        return "\n".join(lines)

    def _culprits(self, waiting: Waiting, state: State) -> list[int]:
        """Return the workers that are silent, owe the awaited value, or run another program."""
        known = state.workers
        others = [w for w in range(len(known)) if w != self._members.index]
        silent = [w for w in others if known[w].silent > _SILENT_SECONDS]
        if silent:
            return silent
        if waiting.topic is not None:
            return [w for w in state.missing.get(waiting.topic, ()) if w in others]
        return [w for w in others if self._is_elsewhere(known[w], waiting)]

    def _is_elsewhere(self, known: WorkerState, waiting: Waiting) -> bool:
        number, report = self._progress.number, known.report
        if report is None or report.number < number:
            return True
        return report.number == number and report.label != waiting.label

    def _describe(self, worker: int, known: WorkerState) -> str:
        report, name = known.report, self._members.names[worker]
        if known.ended is not None:
            return f"{name}: {known.ended}"
        if report is None:
            return f"{name}: has not reported yet"
        if known.silent > _SILENT_SECONDS:
            doing = f"not heard of for {known.silent:.0f} s (stopped?), was"
        else:
            doing = "alive,"
        waits = "busy" if report.waits is None else f"waiting {report.seconds:.0f} s"
        where = "; ".join(report.where)
        return (
            f"{name}: {doing} {waits}, at collective {report.number} ({report.label}); "
            f"stands at {where}"
        )
