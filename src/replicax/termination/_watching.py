"""The notice that this worker's machine is about to be preempted."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import final

_POLL_SECONDS = 1.0


@final
class Watcher:
    """A thread that polls a function until it returns True; it ends with this object.

    Args:
      is_requested: The function.
    """

    def __init__(self, is_requested: Callable[[], bool]) -> None:
        self._seen = _Seen()
        stop = threading.Event()
        weakref.finalize(self, stop.set)
        threading.Thread(
            target=_poll,
            args=(is_requested, self._seen, stop),
            name="replicax-termination",
            daemon=True,
        ).start()

    def told_at(self) -> float | None:
        """Return when the function returned True, by `time.monotonic`; raise its error, if any."""
        if self._seen.error is not None:
            raise self._seen.error
        return self._seen.at


@final
class _Seen:
    """The state of the thread, separate from the watcher, which the thread must not keep alive."""

    def __init__(self) -> None:
        self.at: float | None = None
        self.error: Exception | None = None


def _poll(is_requested: Callable[[], bool], seen: _Seen, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            if is_requested():
                seen.at = time.monotonic()
                return
        except Exception as error:
            error.add_note("It was raised by the `termination_watcher_fn`, in its thread.")
            seen.error = error
            return
        stop.wait(_POLL_SECONDS)
