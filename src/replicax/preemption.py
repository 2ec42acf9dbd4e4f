"""`rx.preemption`: stopping together when one of the workers is told to."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from replicax import cluster
from replicax.errors import ContextError

__all__ = ["requested"]

_installed = False
_received_at: float | None = None


def requested() -> bool:
    """Whether the program should save its state and end, because a worker was told to (SIGTERM).

    Ask once per step, on every worker: all of them get True at the same step, which need not be
    that in which the signal came. The first call installs the handler; a second SIGTERM ends the
    process at once, as it always did.

    >>> import replicax as rx
    >>> rx.preemption.requested()
    False
    """
    return agreed(received_at() is not None)


def received_at() -> float | None:
    """Return when SIGTERM came, by `time.monotonic`; None so far. Installs the handler."""
    if not _installed:
        _install()
    return _received_at


def agreed(told: bool) -> bool:
    """Return whether all workers stop at this question, because one of them was `told` to."""
    session = cluster.session()
    if session is None:
        return told
    if told:
        session.preempt()  # also if it was told before the workers came together
    return session.stop_requested()


def _install() -> None:
    global _installed
    if threading.current_thread() is not threading.main_thread():
        raise ContextError(
            "Preemption was first asked about in a thread that is not the main one, where Python "
            "does not let a signal be handled. Call `rx.preemption.requested()` once in the main "
            "thread, or make the `PreemptionCheckpointHandler` there."
        )
    previous, process = signal.getsignal(signal.SIGTERM), os.getpid()

    def on_signal(number: int, frame: Any) -> None:
        global _received_at
        signal.signal(signal.SIGTERM, previous)
        if os.getpid() == process:
            _received_at = time.monotonic()
        else:  # a child that was forked, such as one that reads data, is ended by it as any other
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, on_signal)
    _installed = True
