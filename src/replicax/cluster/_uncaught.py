"""Errors that end a worker's program, however they get out of it."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, final

from replicax.cluster._progress import Progress, is_users
from replicax.errors import WorkerLost


@final
class Uncaught:
    """Hooks for errors that nothing catches.

    Args:
      progress: Knows which threads work together with other workers.
      tell: Called with an error that ends the program, before it is shown.
    """

    def __init__(self, progress: Progress, tell: Callable[[BaseException], None]) -> None:
        self._progress = progress
        self._tell = tell
        self._process = os.getpid()
        self._noticed = False
        self._in_thread: tuple[BaseException, threading.Thread, int] | None = None
        self._excepthook = sys.excepthook
        sys.excepthook = self._on_error
        self._thread_excepthook = threading.excepthook
        threading.excepthook = self._on_error_in_thread

    def unnoticed(self) -> tuple[BaseException, threading.Thread] | None:
        """Return, at exit, an error that ended the program without `sys.excepthook`.

        A failed thread that works with other workers has ended the program if nothing was done
        together after its failure. Python keeps the main thread's error for debuggers, even if the
        program has a hook of its own; at a prompt, that is the error of some earlier line.
        """
        if self._in_thread is not None and self._in_thread[2] == self._progress.number:
            return self._in_thread[:2]
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None or self._noticed or hasattr(sys, "ps1"):
            return None
        return error, threading.main_thread()

    def _on_error(self, kind: Any, error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._process:  # a forked child, which is not a worker
            self._excepthook(kind, error, trace)
            return
        self._noticed = True
        self._tell(error)
        if isinstance(error, WorkerLost):
            # It is another worker's traceback that says what went wrong.
            print(f"replicax.errors.{kind.__name__}: {error}", file=sys.stderr)
            print(f"  This worker was at{place_of(error)}", file=sys.stderr, flush=True)
        else:
            self._excepthook(kind, error, trace)

    def _on_error_in_thread(self, args: threading.ExceptHookArgs) -> None:
        thread, error = args.thread, args.exc_value
        own = os.getpid() == self._process
        if own and thread is not None and error is not None and self._progress.takes_part(thread):
            self._in_thread = error, thread, self._progress.number
        self._thread_excepthook(args)


def place_of(error: BaseException) -> str:
    """Return where an error was raised, for a message: the last line of the user's own code."""
    places = traceback.extract_tb(error.__traceback__)
    place = [entry for entry in places if is_users(entry.filename)] or places
    return f" ({place[-1].filename}:{place[-1].lineno})" if place else ""
