"""Threads that write checkpoints: one at a time, each registered until it ends."""

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
# Python 3.12.0 and 3.12.1 start no threads once the program is ending, and Orbax needs some to
# write (python/cpython#113964): the last save would be lost. On these versions a save is not
# asynchronous.
IN_BACKGROUND = not (3, 12, 0) <= sys.version_info[:3] < (3, 12, 2)
_PATIENCE_SECONDS = 5.0  # before an exiting program reports what it waits for


@final
class _Writers:
    """The writers that have not ended, for which an ending program waits."""

    def __init__(self) -> None:
        self.running: set[Writer] = set()
        # Two writers in one directory would need to agree on numbers and on removals, and Orbax has
        # process-wide state.
        self.one_at_a_time = threading.Lock()


_writers = _Writers()


@final
class Writer:
    """A thread that writes a checkpoint.

    Args:
      path: The path of the checkpoint.
      write: The function that writes it.
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="replicax-checkpoint")
        files.load()
        _wait_at_exit()
        _writers.running.add(self)
        try:
            self._thread.start()
        except BaseException:
            _writers.running.discard(self)
            raise
        if not IN_BACKGROUND:
            self._thread.join()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            with _writers.one_at_a_time:
                write()
        except BaseException as error:
            self._error = system_error(error) or error
            atexit.register(self._complain)
        finally:
            _writers.running.discard(self)

    def news(self, seconds: float | None) -> Any:
        """Wait up to this many seconds, and return the state of the save."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            return BUSY
        if self._error is None:
            return DONE
        return {"path": str(self.path), "error": reason(self._error)}

    @property
    def has_failed(self) -> bool:
        """True if it has ended with an error."""
        return not self._thread.is_alive() and self._error is not None

    def surface(self) -> BaseException | None:
        """Return the error, if any, for the caller to raise."""
        atexit.unregister(self._complain)
        return self._error

    def _complain(self) -> None:
        """Print the error of a save whose outcome the program never requested."""
        assert self._error is not None
        _say(f"the checkpoint {self.path} was not written: {reason(self._error)}.")


def under_way(directory: Path) -> list[Writer]:
    """Return this process's unfinished saves into a directory."""
    place = os.path.realpath(directory)
    return [each for each in list(_writers.running) if os.path.realpath(each.path.parent) == place]


@functools.cache
def _wait_at_exit() -> None:
    """Make an ending program wait for its saves."""
    # `atexit` would be too late: by then, Python has closed the thread pools that Orbax uses.
    register = threading._register_atexit  # pyright: ignore[reportAttributeAccessIssue]
    register(_finish_all)


def _finish_all() -> None:
    for writer in list(_writers.running):
        if writer.news(_PATIENCE_SECONDS) == BUSY:
            _say(f"the program has ended, and waits for {writer.path} to be written.")
            writer.news(None)


def _say(text: str) -> None:
    print(f"replicax: {text}", file=sys.stderr, flush=True)
