"""The order in which processes end."""

from __future__ import annotations

import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import final

from replicax.launch._events import Events, ProcessEnded


@final
class Exits:
    """A watcher that puts a `ProcessEnded` per process into `events`, in the order of the ends.

    When one worker dies, the others notice and may end within a millisecond. With one waiting
    thread per process, each must get the GIL before it can report; under heavy output, that was
    late enough to blame the wrong worker in 1 of 20 cases 2 ms apart. Linux keeps the order itself:
    the descriptor of a process becomes readable when it ends, and epoll returns descriptors in that
    order.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], events: Events) -> None:
        self._processes = processes
        self._events = events
        descriptors = _descriptors(processes)
        if descriptors is None:
            self._threads = [_thread(self._wait, index) for index in range(len(processes))]
        else:
            self._threads = [_thread(self._wait_for_all, descriptors)]

    def join(self) -> None:
        """Wait until every process has ended."""
        for thread in self._threads:
            thread.join()

    def _wait(self, index: int) -> None:
        code = self._processes[index].wait()
        self._events.put(ProcessEnded(index, code, time.monotonic()))

    def _wait_for_all(self, descriptors: Sequence[int]) -> None:
        with selectors.DefaultSelector() as selector:
            for index, descriptor in enumerate(descriptors):
                selector.register(descriptor, selectors.EVENT_READ, index)
            while selector.get_map():
                for key, _ in selector.select():
                    self._wait(key.data)
                    selector.unregister(key.fd)
                    os.close(key.fd)


def _descriptors(processes: Sequence[subprocess.Popen[bytes]]) -> list[int] | None:
    """Return a descriptor of each process, or None where the system has none."""
    found: list[int] = []
    try:
        for process in processes:
            found.append(os.pidfd_open(process.pid))
    except (AttributeError, OSError):  # a system other than Linux, or a sandbox
        for descriptor in found:
            os.close(descriptor)
        return None
    return found


def _thread(target: Callable[..., None], argument: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=(argument,), name="replicax-exits", daemon=True)
    thread.start()
    return thread
