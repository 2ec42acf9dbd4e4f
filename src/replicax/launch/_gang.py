"""Workers that live and die together."""

from __future__ import annotations

import math
import queue
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from replicax._seconds import require_seconds
from replicax.launch._events import Asked, Events, ProcessEnded
from replicax.launch._exits import Exits
from replicax.launch._output import Output
from replicax.launch._screen import Screen
from replicax.launch._status import Status
from replicax.launch._worker import Worker

# How many seconds the other processes of ended workers have to tidy up. Python has one that removes
# the shared memory that a killed process has left behind.
_TIDYING = 1.0


@dataclass(frozen=True, slots=True)
class Patience:
    """The time to wait for workers, in seconds; `math.inf` means without limit.

    Args:
      grace: From a signal to the launcher, which is passed on to the workers, until they are
        killed.
      notice: From the first failure, which the others notice and report by themselves, until they
        get SIGTERM.
      terminate: From SIGTERM until they are killed.
    """

    grace: float = 30.0
    notice: float = 10.0
    terminate: float = 5.0

    def __post_init__(self) -> None:
        for name in ("grace", "notice", "terminate"):
            require_seconds(f"`{name}`", getattr(self, name))


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a worker."""

    worker: int
    code: int
    seconds: float
    sent: signal.Signals | None  # the last signal that the launcher had sent it

    @property
    def exit_code(self) -> int:
        """The exit code as a shell reports it."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def how(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:  # a real-time signal
            return f"killed by signal {-self.code}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of running a gang.

    Args:
      endings: The endings of all workers, in the order in which they ended.
      failure: The first one that failed, unless the launcher got a signal before that.
      asked: The first signal that the launcher got.
      last_lines: The last output of the worker that failed.
    """

    endings: tuple[Ending, ...]
    failure: Ending | None
    asked: signal.Signals | None
    last_lines: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        if self.failure is not None:
            return self.failure.exit_code
        if self.asked is not None and any(ending.code for ending in self.endings):
            return 128 + self.asked
        return 0


@final
class Gang:
    """Workers that were started together; `close` it, or use it in a `with` block.

    Args:
      command: The command that each worker runs.
      environments: The environment of each worker.
      screen: The screen that shows their output.
      status: The status to keep up to date.
      events: The source of signals to the launcher.
      patience: How long to wait for workers to end.
      log_directory: The directory for a file with the output of each worker.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        screen: Screen,
        status: Status,
        events: Events,
        patience: Patience,
        log_directory: Path | None = None,
    ) -> None:
        self._screen = screen
        self._status = status
        self._events = events
        self._patience = patience
        self._steps: deque[tuple[float, signal.Signals]] = deque()
        self._sent: signal.Signals | None = None
        self._asked: Asked | None = None
        self._ended: list[tuple[ProcessEnded, signal.Signals | None]] = []
        self._workers: list[Worker] = []
        self._output: Output | None = None
        self._exits: Exits | None = None
        try:
            for environment in environments:
                self._workers.append(Worker(command, environment))
            self._output = Output([w.output for w in self._workers], screen, log_directory)
            self._exits = Exits([worker.process for worker in self._workers], events)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> Outcome:
        """Wait for all workers, and stop them when one fails or the launcher is asked to stop."""
        self._status.since = time.monotonic()
        self._update_status("")
        while len(self._ended) < len(self._workers):
            try:
                event = self._events.get(timeout=self._until_next_step())
            except queue.Empty:
                self._send(self._steps.popleft()[1])
                continue
            if isinstance(event, Asked):
                self._on_asked(event)
            else:
                self._on_ended(event)
        assert self._output is not None
        self._output.wait(_TIDYING)
        self.close()
        return self._outcome()

    def close(self) -> None:
        """Kill the remaining processes, and show the rest of their output."""
        for worker in self._workers:
            worker.close()
        if self._exits is not None:
            self._exits.join()
        if self._output is not None:
            self._output.finish()
        for worker in self._workers:
            worker.output.close()

    def _until_next_step(self) -> float | None:
        left = self._steps[0][0] - time.monotonic() if self._steps else math.inf
        return None if left == math.inf else max(0.0, left)

    def _on_asked(self, event: Asked) -> None:
        if self._asked is None:
            self._asked = event
            self._steps = deque([(event.when + self._patience.grace, signal.SIGKILL)])
            self._send(event.signal)
            self._update_status(f"{event.signal.name}: stopping")
            grace = self._patience.grace
            limit = "may take any time" if grace == math.inf else f"are killed after {grace:g} s"
            self._screen.say(
                f"Got {event.signal.name}, and sent it to the workers. They {limit}; press Ctrl-C "
                "to kill them now."
            )
        elif event.signal is signal.SIGINT:
            self._steps.clear()
            self._send(signal.SIGKILL)
        else:  # a scheduler's repetition: no reason to cut a checkpoint short
            self._send(event.signal)

    def _on_ended(self, event: ProcessEnded) -> None:
        failed_already = any(ended.code for ended, _ in self._ended)
        self._ended.append((event, self._sent))
        self._update_status(self._status.doing)
        if event.code == 0 or failed_already or self._asked is not None:
            return
        notice = event.when + self._patience.notice
        self._steps = deque(
            [(notice, signal.SIGTERM), (notice + self._patience.terminate, signal.SIGKILL)]
        )
        self._update_status(f"worker {event.worker} failed: stopping")
        if self._status.running:
            self._screen.say(
                f"Worker {event.worker} failed. The others have {self._patience.notice:g} s to "
                "end by themselves."
            )

    def _send(self, number: signal.Signals) -> None:
        ended = {event.worker for event, _ in self._ended}
        self._sent = number
        for index, worker in enumerate(self._workers):
            if index not in ended:
                worker.send(number)

    def _update_status(self, doing: str) -> None:
        self._status.running = len(self._workers) - len(self._ended)
        self._status.doing = doing

    def _outcome(self) -> Outcome:
        assert self._output is not None
        ended = sorted(self._ended, key=lambda pair: pair[0].when)
        endings = tuple(
            Ending(event.worker, event.code, event.when - self._workers[event.worker].started, sent)
            for event, sent in ended
        )
        failure = None
        for (event, _), ending in zip(ended, endings, strict=True):
            if event.code and (self._asked is None or event.when < self._asked.when):
                failure = ending
                break
        return Outcome(
            endings,
            failure,
            None if self._asked is None else self._asked.signal,
            () if failure is None else tuple(self._output.last_lines(failure.worker)),
        )
