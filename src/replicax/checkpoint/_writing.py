"""Threads that write checkpoints: one at a time, and each known until it has ended."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from replicax.checkpoint import _files as files
from replicax.checkpoint._failures import reason, system_error

BUSY, DONE = "busy", "done"
# Python 3.12.0 and 3.12.1 start no thread once the program has come to its end, and Orbax needs
# some to write (python/cpython#113964): what is saved last would be lost. There a save is awaited.
IN_BACKGROUND = not (3, 12, 0) <= sys.version_info[:3] < (3, 12, 2)
_PATIENCE_SECONDS = 5.0  # of a program that ends, before it says what it waits for

_writings: set[Writing] = set()
# Two writers in one directory would have to agree on numbers, and on what is removed; and Orbax
# has state of its own for the whole process.
_one_at_a_time = threading.Lock()


@final
class Writing:
    """A thread that writes a checkpoint.

    Args:
      path: Of the checkpoint.
      write: Writes it.
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="replicax-checkpoint")
        files.load()
        _wait_at_exit()
        _writings.add(self)
        try:
            self._thread.start()
        except BaseException:
            _writings.discard(self)
            raise
        if not IN_BACKGROUND:
            self._thread.join()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            with _one_at_a_time:
                write()
        except BaseException as error:
            self._error = system_error(error) or error
            atexit.register(self._complain)
        finally:
            _writings.discard(self)

    def news(self, seconds: float | None) -> Any:
        """Return how it stands, at the latest after so many seconds."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            return BUSY
        if self._error is None:
            return DONE
        return {"path": str(self.path), "error": reason(self._error)}

    @property
    def has_failed(self) -> bool:
        """Whether it has ended, and in an error."""
        return not self._thread.is_alive() and self._error is not None

    def surface(self) -> BaseException | None:
        """Return what went wrong, for the caller to raise."""
        atexit.unregister(self._complain)
        return self._error

    def _complain(self) -> None:
        """Print the error of a save whose outcome the program has never asked for."""
        assert self._error is not None
        _say(f"the checkpoint {self.path} was not written: {reason(self._error)}.")


def under_way(directory: Path) -> list[Writing]:
    """Return what this process writes into a directory, or is about to."""
    place = os.path.realpath(directory)
    return [each for each in list(_writings) if os.path.realpath(each.path.parent) == place]


@functools.cache
def _wait_at_exit() -> None:
    """Have a program that ends wait for what it is about to write."""
    # `atexit` comes later, when Python has closed the pools of threads that Orbax uses.
    register = threading._register_atexit  # pyright: ignore[reportAttributeAccessIssue]
    register(_finish_all)


def _finish_all() -> None:
    for writing in list(_writings):
        if writing.news(_PATIENCE_SECONDS) == BUSY:
            _say(f"the program has ended, and waits for {writing.path} to be written.")
            writing.news(None)


def _say(text: str) -> None:
    print(f"replicax: {text}", file=sys.stderr, flush=True)
