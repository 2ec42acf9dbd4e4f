"""`rx.preemption`: stopping together when one of the workers is asked to."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from typing import final

from replicax import cluster
from replicax.errors import ContextError

__all__ = ["requested"]


def requested() -> bool:
    """Tell whether the program should save and exit because a worker was asked to (SIGTERM).

    Ask once per step, on every worker: all of them get True at the same step, which need not be
    the one in which the signal came. The first call installs the handler; a second SIGTERM ends the
    process at once, as it would without replicax.

    >>> import replicax as rx
    >>> rx.preemption.requested()
    False
    """
    return agreed(received_at() is not None)


def received_at() -> float | None:
    """Install the handler; return when SIGTERM came, by `time.monotonic`, or None."""
    return _handler().received_at


def agreed(requested: bool) -> bool:
    """Return whether all workers stop at this call, because one of them was asked to."""
    session = cluster.session()
    if session is None:
        return requested
    if requested:
        session.preempt()  # even if the signal came before the workers connected
    return session.stop_requested()


@final
class _Handler:
    """A handler that notes the first SIGTERM; later ones go to the previous handler."""

    def __init__(self) -> None:
        self.received_at: float | None = None
        # It is None if a library in C has set it, and Python cannot put that back.
        self._previous = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
        self._process = os.getpid()

    def __call__(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)
        if os.getpid() == self._process:
            self.received_at = time.monotonic()
        else:  # SIGTERM ends a forked child, such as one that reads data, like any other process
            os.kill(os.getpid(), number)


@functools.cache
def _handler() -> _Handler:
    """Return the handler of this process, which is installed when it is first asked for."""
    if threading.current_thread() is not threading.main_thread():
        raise ContextError(
            "Preemption was first asked about in a thread that is not the main one, where Python "
            "does not let a signal be handled. Call `rx.preemption.requested()` once in the main "
            "thread, or make the `PreemptionCheckpointHandler` there."
        )
    handler = _Handler()
    signal.signal(signal.SIGTERM, handler)
    return handler
