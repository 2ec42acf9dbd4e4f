"""The events of a gang: a worker ends, or the launcher is asked to stop."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """The process of a worker has ended."""

    worker: int
    code: int  # as in `subprocess`: minus the number of the signal that killed it
    when: float


@dataclass(frozen=True, slots=True)
class Asked:
    """The launcher got this signal."""

    signal: signal.Signals
    when: float = field(default_factory=time.monotonic)


# A `SimpleQueue`, because a signal handler may call `put` while its own thread is in `get`.
Events = queue.SimpleQueue[ProcessEnded | Asked]


@contextlib.contextmanager
def asking(events: Events) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and the end of the terminal into events."""
    if threading.current_thread() is not threading.main_thread():  # Handlers need the main thread.
        yield
        return
    meanings: dict[int, signal.Signals] = {
        signal.SIGINT: signal.SIGINT,
        signal.SIGTERM: signal.SIGTERM,
    }
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # otherwise `nohup` runs this
        meanings[signal.SIGHUP] = signal.SIGTERM
    before = {
        number: signal.signal(number, lambda number, _: events.put(Asked(meanings[number])))
        for number in meanings
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
