"""The verdict on one attempt of the launcher, given the faults that were injected in it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from chaos.program import TIMEOUT_SECONDS
from chaos.schedules import Event

# From a failure until all workers have ended: those that are left get 10 s to notice it, then
# SIGTERM, and SIGKILL after 5 s. The rest is for busy machines.
END_SECONDS = 10.0 + 5.0 + 15.0
# A worker that has not failed is missed after the time-out, and looked for for some seconds.
STUCK_SECONDS = TIMEOUT_SECONDS + 15.0

_ERRORS = r"\b(?:WorkerLost|StartFailed|InputFailed): "
_LOSS = re.compile(rf"{_ERRORS}.*")


@dataclass(frozen=True)
class Attempt:
    """The traces of one attempt.

    Args:
      said: What the launcher said.
      logs: What each worker wrote.
      event: What has happened in it.
      seconds: From the event, or from the beginning if there was none, to the end.
      code: The exit code of the launcher, if this was its last attempt.
    """

    said: str
    logs: tuple[str, ...]
    event: Event | None
    seconds: float
    code: int | None

    @property
    def losses(self) -> list[str]:
        """Messages in which a worker blames another one."""
        return [found[0] for log in self.logs for found in _LOSS.finditer(log)]

    @property
    def last_lines(self) -> list[str]:
        """The last line that each worker wrote."""
        return [
            f"worker {worker} wrote last:\n    " + "\n    ".join(log.splitlines()[-12:])
            for worker, log in enumerate(self.logs)
        ]

    def said_by_all(self, pattern: str) -> list[str]:
        """Return the reports of the workers that wrote one."""
        return [found[1] for log in self.logs if (found := re.search(pattern, log, re.MULTILINE))]


def blamed(message: str) -> set[int]:
    """Return the workers that a message blames.

    A worker that was lost because it had lost another one says so, and that one is to blame. A
    message of one that has waited names itself first, and those that it blames last.
    """
    message = re.split(_ERRORS, message)[-1]
    waited = re.search(
        r"(?:has waited \d+ s in .*? for|still waits for|could not reach) (worker .*?)(?:\. |$)",
        message,
        re.MULTILINE,
    )
    if waited is not None:
        return {int(number) for number in re.findall(r"\bworker (\d+)", waited[1])}
    first = re.search(r"\bworker (\d+)", message)
    return set() if first is None else {int(first[1])}


def problems(attempt: Attempt) -> list[str]:
    """Return what is not as it must be."""
    event = attempt.event
    found = list(_of_ending(attempt))
    if event is not None and not event.harmless:
        limit = END_SECONDS + (STUCK_SECONDS if event.is_missed else 0.0)
        if attempt.seconds > limit:
            found.append(f"took {attempt.seconds:.0f} s to end, and not {limit:.0f} s at most")
    return found


def _of_ending(attempt: Attempt) -> Iterator[str]:
    event = attempt.event
    if event is None or event.harmless:
        yield from _all_well(attempt)
    elif event.launcher:
        yield from _launcher_ended(attempt, event)
    elif event.kind == "SIGTERM":
        yield from _stopped_together(attempt)
    elif event.breaks_save:
        yield from _save_failed(attempt)
    elif event.is_missed:
        yield from _missed(attempt, event.worker)
    else:
        how = {"raise": "exit code 1", "SIGKILL": "killed by SIGKILL"}
        code = {"raise": 1, "SIGKILL": 137}.get(event.kind, event.code)
        yield from _failed_first(attempt, event.worker, how.get(event.kind, f"exit code {code}"))
        if attempt.code not in (None, code):
            yield f"the launcher ended with code {attempt.code}, and not {code}"
        if event.kind == "raise" and "ArithmeticError: chaos" not in attempt.said:
            yield "the launcher did not show the exception"
    if event is not None and not event.launcher:
        for message in attempt.losses:
            if blamed(message) != {event.worker}:
                yield f"blames another than worker {event.worker}: {message}"


def _all_well(attempt: Attempt) -> Iterator[str]:
    if attempt.code != 0 or "failed" in attempt.said:
        yield f"did not end well (code {attempt.code}): {attempt.said}"
    for message in attempt.losses:
        yield f"nothing was to be lost: {message}"


def _launcher_ended(attempt: Attempt, event: Event) -> Iterator[str]:
    number = signal.SIGTERM if event.kind == "SIGHUP" else getattr(signal, event.kind)
    if event.kind == "SIGKILL":
        if attempt.code != -signal.SIGKILL:
            yield f"the launcher was killed, and ended with code {attempt.code}: {attempt.said}"
        return
    if attempt.code == 0:  # the workers had finished, or stopped as they were asked to
        return
    if attempt.code != 128 + number:
        yield f"the launcher got {event.kind}, and ended with code {attempt.code}"
    if f"Got {number.name}" not in attempt.said or "failed first" in attempt.said:
        yield f"the launcher did not say that it got {number.name}: {attempt.said}"


def _stopped_together(attempt: Attempt) -> Iterator[str]:
    """All stopped after one step, and saved; or it came too late for any of them to stop."""
    steps = attempt.said_by_all(r"^stopped after step (\d+)$")
    if not steps:
        yield from _all_well(attempt)
        return
    if len(steps) != len(attempt.logs) or len(set(steps)) != 1:
        yield f"workers stopped after different steps: {steps}"
    if "failed first: exit code 143" not in attempt.said or attempt.code not in (None, 143):
        yield f"not stopped with code 143 ({attempt.code}): {attempt.said}"
    for message in attempt.losses:
        yield f"nobody was lost: {message}"


def _save_failed(attempt: Attempt) -> Iterator[str]:
    messages = attempt.said_by_all(r"\bSaveFailed: (.*)")
    if len(messages) != len(attempt.logs):
        yield f"{len(messages)} of {len(attempt.logs)} workers raised SaveFailed"
    if any(blamed(message) != {0} for message in messages):
        yield f"SaveFailed does not blame worker 0: {messages}"
    if "SaveFailed: " not in attempt.said or attempt.code not in (None, 1):
        yield f"the launcher does not show SaveFailed (code {attempt.code}): {attempt.said}"


def _missed(attempt: Attempt, worker: int) -> Iterator[str]:
    """The worker is there or left without an error, so others fail, and name it."""
    shown = [blamed(found[0]) for found in _LOSS.finditer(attempt.said)]
    if {worker} not in shown or attempt.code not in (None, 1):
        yield f"the launcher does not show who was missed (code {attempt.code}): {attempt.said}"


def _failed_first(attempt: Attempt, worker: int, how: str) -> Iterator[str]:
    if f"Worker {worker} failed first: {how} after " not in attempt.said:
        yield f"worker {worker} did not fail first with {how}: {attempt.said}"
