"""The agreement of all workers to stop at the same step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from replicax.cluster._messages import Calls, Preempted, ToHub

_POLL_SECONDS = 0.2  # how often a waiting thread checks whether to keep waiting


@final
class AgreedStop:
    """The agreement on the question at which all workers stop; see `rx.preemption.requested`.

    Each worker asks once per step whether to stop, but not at the same moment. So when one of them
    has a reason to stop, all report how many of their questions were answered, and answer no more
    until they have agreed on the next question of the fastest worker. Only the connections' threads
    take part, so no worker waits for a busy one.
    """

    def __init__(self, send: Callable[[ToHub], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._answered = 0
        self._deciding = False
        self._at: int | None = None

    def request(self) -> None:
        """Tell all workers that this one must stop."""
        self._send(Preempted())

    def asked(self, check: Callable[[], None]) -> bool:
        """Return whether to stop at this question; call `check` while waiting for the answer."""
        while True:
            with self._changed:
                if not self._deciding or self._at is not None:
                    self._answered += 1
                    return self._at is not None and self._answered >= self._at
                self._changed.wait(_POLL_SECONDS)
            check()

    def answer(self) -> None:
        """Report how many questions were answered; answer none until the agreement is known."""
        with self._changed:
            self._deciding = True
            self._send(Calls(self._answered))

    def set(self, at: int) -> None:
        """Set the question at which to stop."""
        with self._changed:
            self._at = at
            self._changed.notify_all()
