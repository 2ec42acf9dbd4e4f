"""A thread for programs that may never return."""

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
    """A thread that runs programs that need other workers, one at a time.

    XLA waits for them in C++, where neither exceptions nor signals reach the caller. With this
    thread in between, the caller can learn that a worker is lost, and Ctrl-C works. It costs 0.1 ms
    per program.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._unfinished = 0
        threading.Thread(target=self._run_all, name="replicax-programs", daemon=True).start()

    def run(self, program: Callable[[], Result], check: Callable[[], None]) -> Result:
        """Return the result of `program`; call `check`, which may raise, while it runs."""
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
            raise outcome.pop("error")  # popped, because its traceback refers to `outcome`
        return outcome["result"]

    @property
    def busy(self) -> bool:
        """True while a program runs, even if its caller no longer waits for it."""
        return self._unfinished > 0

    def _run_all(self) -> None:
        while True:
            self._work.get()()
