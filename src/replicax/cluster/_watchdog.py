"""Says who is to blame when a worker waits in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, final

from replicax.cluster._link import Link
from replicax.cluster._members import Members
from replicax.cluster._progress import Progress, Waiting
from replicax.errors import WorkerLost

_PULSE_SECONDS = 0.25
_REPORT_SECONDS = 1.0
# How long a collective may go on after somebody has ended, whose part in it may be done.
_GRACE_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
# A worker that has not reported for so long is stopped, or its machine is.
_SILENT_SECONDS = 5.0


@final
class Watchdog:
    """Reports in a thread what this worker does, and judges whether it waits in vain.

    Args:
      members: Who takes part.
      link: The connection to the hub.
      progress: What this worker does.
      timeout_seconds: How long to wait for a worker that is alive.
      on_pulse: Called every quarter of a second.
    """

    def __init__(
        self,
        members: Members,
        link: Link,
        progress: Progress,
        timeout_seconds: float,
        on_pulse: Callable[[], None],
    ) -> None:
        self._members = members
        self._link = link
        self._progress = progress
        self._timeout = timeout_seconds
        self._on_pulse = on_pulse
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="replicax-watchdog", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def check(self, waiting: Waiting) -> None:
        """Raises `WorkerLost` if what is waited for is not going to come."""
        now = time.monotonic()
        if self._link.ended and now - max(waiting.since, self._link.ended_at) > _GRACE_SECONDS:
            self.raise_loss(waiting.label)
        if now - waiting.since > self._timeout:
            raise WorkerLost(self._diagnosis(waiting))

    def raise_loss(self, label: str, cause: BaseException | None = None) -> None:
        """Raises `WorkerLost` for the first worker that has ended."""
        worker = next(iter(self._link.ended))
        raise WorkerLost(
            f"{self._link.explain(worker)} {self._members.name} needs it for {label} (collective "
            f"{self._progress.number})."
        ) from cause

    def _watch(self) -> None:
        reported = 0.0
        while not self._closed.wait(_PULSE_SECONDS):
            self._on_pulse()
            now = time.monotonic()
            if now - reported >= _REPORT_SECONDS:
                reported = now
                self._link.send({"kind": "report", "report": self._progress.report()})

    def _diagnosis(self, waiting: Waiting) -> str:
        """Who is to blame, and what everybody does."""
        state = self._link.state(_ANSWER_SECONDS)
        seconds = time.monotonic() - waiting.since
        if state is None:
            culprits, workers = [0], []
        else:
            workers = state["workers"]
            culprits = self._culprits(waiting, state)
        names = " and ".join(self._members.describe(worker) for worker in culprits)
        lines = [
            f"{self._members.name} has waited {seconds:.0f} s in {waiting.label} "
            f"(collective {self._progress.number}) for {names or 'the other workers'}."
        ]
        if state is None:
            silent = time.monotonic() - self._link.heard
            lines.append(
                f"  {self._members.names[0]}: has not been heard of for {silent:.0f} s: it is "
                "stopped, or its machine or the network is."
            )
        lines += [f"  {self._describe(worker, known)}" for worker, known in enumerate(workers)]
        lines.append(
            "If a worker may take that long, raise `timeout_seconds` of the "
            "`rx.experimental.CommunicationOptions` given to the strategy."
        )
        return "\n".join(lines)

    def _culprits(self, waiting: Waiting, state: dict[str, Any]) -> list[int]:
        others = [w for w in range(len(state["workers"])) if w != self._members.index]
        silent = [w for w in others if state["workers"][w]["silent"] > _SILENT_SECONDS]
        if silent:
            return silent
        if waiting.topic is not None:
            return [w for w in state["missing"].get(waiting.topic, []) if w in others]
        reports = {w: state["workers"][w]["report"] for w in others}
        behind = [w for w in others if reports[w].get("number", 0) < self._progress.number]
        return behind or [w for w in others if reports[w].get("waits") is None]

    def _describe(self, worker: int, known: dict[str, Any]) -> str:
        report, name = known["report"], self._members.names[worker]
        if known["ended"] is not None:
            return f"{name}: {known['ended']}"
        if not report:
            return f"{name}: has not reported yet"
        if known["silent"] > _SILENT_SECONDS:
            doing = f"not heard of for {known['silent']:.0f} s (stopped?), was"
        else:
            doing = "alive,"
        waits = "busy" if report["waits"] is None else f"waiting {report['seconds']:.0f} s"
        where = "; ".join(report["where"])
        return (
            f"{name}: {doing} {waits}, at collective {report['number']} ({report['label']}); "
            f"stands at {where}"
        )
