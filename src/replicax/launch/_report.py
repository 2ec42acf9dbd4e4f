"""The launcher's messages at the end of a run."""

from __future__ import annotations

import signal
from pathlib import Path

from replicax.launch._gang import Ending, Outcome


def report(outcome: Outcome, log_directory: Path | None) -> list[str]:
    """Return messages about the outcome of a gang; none if all went well."""
    if outcome.exit_code == 0:
        return []
    failure = outcome.failure
    if failure is None:
        return [f"Worker {ending.worker}: {_end(ending)}." for ending in _sorted(outcome)]
    head = f"Worker {failure.worker} failed first: {failure.how} after {failure.seconds:.1f} s."
    if outcome.last_lines:
        head += " The last lines of its output:\n"
        head += "\n".join(f"    {line}" for line in outcome.last_lines)
    else:
        head += " It wrote nothing."
    others = [
        f"Worker {ending.worker}: {_end(ending)} ({ending.seconds:.1f} s)."
        for ending in _sorted(outcome)
        if ending is not failure
    ]
    if log_directory is not None:
        others.append(f"All output is in {log_directory}.")
    return [head, *others]


def _sorted(outcome: Outcome) -> list[Ending]:
    return sorted(outcome.endings, key=lambda ending: ending.worker)


def _end(ending: Ending) -> str:
    if ending.sent is None or ending.code == 0:
        return ending.how
    if ending.sent is signal.SIGKILL:
        return "killed, as it did not end"
    if ending.code == -ending.sent:
        return f"stopped with {ending.sent.name}"
    return f"{ending.how}, after it was sent {ending.sent.name}"
