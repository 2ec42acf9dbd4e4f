"""How workers stop at the same step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

from replicax.cluster._messages import Calls, Preempted, ToHub

_POLL_SECONDS = 0.2  # how often somebody who waits looks whether it should go on waiting


@final
class AgreedStop:
    """At which question all workers are told to stop; see `rx.preemption.requested`.

    The workers ask once a step each, but not at the same moment. So when one of them has a reason
    to stop, all say how many of their questions were answered, and answer none before it is known
    that the next one of the fastest is the one. That takes the connections' threads only, so it
    makes nobody wait for a worker that is busy.
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
        """Say how many questions were answered, and answer none until it is known where to stop."""
        with self._changed:
            self._deciding = True
            self._send(Calls(self._answered))

    def set(self, at: int) -> None:
        """Stop at this question."""
        with self._changed:
            self._at = at
            self._changed.notify_all()
