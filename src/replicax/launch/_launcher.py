"""Starting a gang, and starting it again when it fails."""

from __future__ import annotations

import queue
import sys
from collections.abc import Sequence
from pathlib import Path

from replicax._seconds import require_seconds
from replicax.errors import InvalidArgument
from replicax.launch._environment import environments, free_ports
from replicax.launch._events import Asked, Events, asking
from replicax.launch._gang import Gang, Outcome, Patience
from replicax.launch._report import report
from replicax.launch._screen import Screen
from replicax.launch._status import Status

# The longest pause before a restart, in seconds.
_LONGEST_PAUSE = 30.0


def launch(
    arguments: Sequence[str],
    *,
    workers: int,
    devices_per_worker: int | None = None,
    max_restarts: int = 0,
    log_directory: Path | None = None,
    compilation_cache: Path | None = None,
    patience: Patience = Patience(),  # noqa: B008 - a frozen value
    backoff: float = 1.0,
) -> int:
    """Run a Python program as a cluster of workers on this machine; return the exit code.

    Args:
      arguments: The interpreter's arguments: a script, or `-m` and a module, followed by its own
        arguments.
      workers: The number of workers.
      devices_per_worker: The number of virtual CPU devices of each; by default, JAX's choice.
      max_restarts: How many times all workers are started again after one has failed.
      log_directory: The directory for `attempt-0/worker-0.log` and so on.
      compilation_cache: The directory that keeps the workers' compiled programs for the next start.
      patience: How long to wait for workers to end.
      backoff: The pause before the first restart in seconds; each further one is twice as long.
    """
    if workers < 1:
        raise InvalidArgument(f"A cluster needs 1 or more workers; got {workers}.")
    if devices_per_worker is not None and devices_per_worker < 1:
        raise InvalidArgument(f"A worker needs 1 or more devices; got {devices_per_worker}.")
    require_seconds("`backoff`", backoff)
    command = [sys.executable, "-u", *arguments]
    status = Status(workers, max_restarts)
    events: Events = queue.SimpleQueue()
    with Screen(status) as screen, asking(events):
        while True:
            directory = log_directory and log_directory / f"attempt-{status.attempt}"
            per_worker = environments(
                free_ports(workers), devices_per_worker, compilation_cache=compilation_cache
            )
            with Gang(command, per_worker, screen, status, events, patience, directory) as gang:
                outcome = gang.run()
            for message in report(outcome, directory):
                screen.say(message)
            if not _worth_another(outcome) or status.attempt == max_restarts:
                return outcome.exit_code
            # The exponent is bounded: after 1,024 attempts the power would not fit in a float.
            pause = min(backoff * 2.0 ** min(status.attempt, 1000), _LONGEST_PAUSE)
            status.doing = "waiting to start again"
            screen.say(f"Starting all workers again in {pause:g} s.")
            try:
                asked = events.get(timeout=pause)
            except queue.Empty:
                status.attempt += 1
            else:  # every worker has ended, so this is a signal
                assert isinstance(asked, Asked)
                return 128 + asked.signal


def _worth_another(outcome: Outcome) -> bool:
    return outcome.failure is not None and outcome.asked is None
