"""A thread for what may never come back."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, final

from replicax._jax_compat import thread_configuration

Result = TypeVar("Result")

_POLL_SECONDS = 0.25


@final
class Runner:
    """Runs programs that need other workers in a thread of its own, one at a time.

    XLA waits for them in C++, where no exception and no signal reaches the one who called. This
    way the program's own thread can be told that somebody is lost, and Ctrl-C works. It costs 0.1
    ms a program.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unfinished = 0
        threading.Thread(target=self._run_all, name="replicax-programs", daemon=True).start()

    def run(self, program: Callable[[], Result], check: Callable[[], None]) -> Result:
        """What `program` returns, or raises; calls `check` now and then, which may raise too."""
        configured, done = thread_configuration(), threading.Lock()
        outcome: dict[str, Any] = {}

        def work() -> None:
            try:
                with configured():
                    outcome["result"] = program()
            except BaseException as error:
                outcome["error"] = error
            finally:
                self._unfinished -= 1
                done.release()

        done.acquire()
        self._unfinished += 1
        self._work.put(work)
        while not done.acquire(timeout=_POLL_SECONDS):
            check()
        if "error" in outcome:
            raise outcome.pop("error")  # whose traceback holds this frame, and so `outcome`
        return outcome["result"]

    @property
    def busy(self) -> bool:
        """Whether a program has not come back, which may be one that nobody waits for any more."""
        return self._unfinished > 0

    def _run_all(self) -> None:
        while True:
            self._work.get()()
