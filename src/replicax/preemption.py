"""`rx.preemption`: stopping together when one of the workers is told to."""

from __future__ import annotations

import signal
import threading
from typing import Any

from replicax import cluster
from replicax.errors import ContextError

__all__ = ["requested"]

_installed = False
_received = False


def requested() -> bool:
    """Whether the program should save its state and end, because a worker was told to (SIGTERM).

    Ask once a step, on every worker: all of them get True at the same step, which need not be that
    in which the signal came. The first call installs the handler; a second SIGTERM ends the process
    at once, as it always did.

    >>> import replicax as rx
    >>> rx.preemption.requested()
    False
    """
    if not _installed:
        _install()
    session = cluster.session()
    if session is None:
        return _received
    if _received:
        session.preempt()  # also if the signal came before the workers did
    return session.stop_requested()


def _install() -> None:
    global _installed
    if threading.current_thread() is not threading.main_thread():
        raise ContextError(
            "`rx.preemption.requested` was first called in a thread that is not the main one, "
            "where Python does not let a signal be handled. Call it once in the main thread."
        )
    previous = signal.getsignal(signal.SIGTERM)

    def on_signal(number: int, frame: Any) -> None:
        global _received
        _received = True
        signal.signal(signal.SIGTERM, previous)

    signal.signal(signal.SIGTERM, on_signal)
    _installed = True
