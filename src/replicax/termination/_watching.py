"""How this worker is told that its machine is about to be taken away."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import final

_POLL_SECONDS = 1.0


@final
class Watcher:
    """Asks a function in a thread, until it says True; the thread ends with this object.

    Args:
      told: The function.
    """

    def __init__(self, told: Callable[[], bool]) -> None:
        self._seen = _Seen()
        stop = threading.Event()
        weakref.finalize(self, stop.set)
        threading.Thread(
            target=_poll, args=(told, self._seen, stop), name="replicax-termination", daemon=True
        ).start()

    def told_at(self) -> float | None:
        """Return when it said True, by `time.monotonic`; raise what it has raised instead."""
        if self._seen.error is not None:
            raise self._seen.error
        return self._seen.at


@final
class _Seen:
    """What the thread has seen; apart from the watcher, which the thread must not keep alive."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.error: Exception | None = None


def _poll(told: Callable[[], bool], seen: _Seen, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            if told():
                seen.at = time.monotonic()
                return
        except Exception as error:
            error.add_note("It was raised by the `termination_watcher_fn`, in its thread.")
            seen.error = error
            return
        stop.wait(_POLL_SECONDS)
