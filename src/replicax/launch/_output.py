"""The output of workers: prefixed on the screen, unchanged in log files, and its last lines."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, final

from replicax._plain_files import open_plain
from replicax.errors import InvalidArgument
from replicax.launch._escapes import harmless
from replicax.launch._screen import Screen

_LAST_LINES = 20
_CHUNK = 1 << 16
# A line longer than this, in bytes, is shown in parts.
_LONG = 1 << 20
# How many seconds to wait for more from a pipe that an unknown process holds open.
_QUIET = 0.5


@final
class Output:
    """A thread that reads the pipes of all workers, so that no worker ever waits for another.

    Args:
      pipes: One for each worker.
      screen: The stream that gets whole lines.
      log_directory: The directory for `worker-0.log` and so on.
    """

    def __init__(
        self, pipes: Sequence[IO[bytes]], screen: Screen, log_directory: Path | None = None
    ) -> None:
        self._screen = screen
        self._lines = [_Lines() for _ in pipes]
        self._finishing = False
        self._selector = selectors.DefaultSelector()
        self._logs: dict[int, IO[bytes]] = {}
        for index, pipe in enumerate(pipes):
            self._selector.register(pipe, selectors.EVENT_READ, index)
        if log_directory is not None:
            self._logs = _open_logs(log_directory, len(pipes))
        self._thread = threading.Thread(target=self._read, name="replicax-output", daemon=True)
        self._thread.start()

    def last_lines(self, index: int) -> list[str]:
        """Return the last lines of a worker's output."""
        return [line.decode(errors="replace") for line in list(self._lines[index].last)]

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until every pipe is closed at its other end."""
        self._thread.join(seconds)

    def finish(self) -> None:
        """Read the remaining output and end."""
        self._finishing = True
        self._thread.join()

    def _read(self) -> None:
        try:
            while self._selector.get_map():
                ready = self._selector.select(timeout=_QUIET)
                if not ready and self._finishing:
                    return
                for key, _ in ready:
                    chunk = os.read(key.fd, _CHUNK)
                    lines = self._lines[key.data]
                    self._log(key.data, chunk)
                    self._screen.show(key.data, lines.add(chunk) if chunk else lines.rest())
                    self._screen.show_progress(key.data, lines.progress)
                    if not chunk:
                        self._selector.unregister(key.fileobj)
        finally:
            for index, lines in enumerate(self._lines):
                self._screen.show(index, lines.rest())
            self._selector.close()
            for log in self._logs.values():
                log.close()

    def _log(self, index: int, chunk: bytes) -> None:
        if index not in self._logs:
            return
        try:
            self._logs[index].write(chunk)
        except OSError as error:  # a full disk is no reason to stop a run
            with contextlib.suppress(OSError):
                self._logs.pop(index).close()
            self._screen.say(f"The log of worker {index} ends here: {error}.")


def _open_logs(directory: Path, count: int) -> dict[int, IO[bytes]]:
    """Open a file for each worker, in the directory itself and nowhere else.

    In a directory that others may write to, a link could get files of this user overwritten.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with contextlib.ExitStack() as opened:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, place)
            logs: dict[int, IO[bytes]] = {
                index: opened.enter_context(
                    open(open_plain(f"worker-{index}.log", flags, dir_fd=place), "wb", 0)
                )
                for index in range(count)
            }
        except OSError as error:
            raise InvalidArgument(
                f"The output of workers cannot be written to {directory}: {error}. Links are not "
                "followed; remove what is in the way, or give another directory."
            ) from error
        opened.pop_all()
        os.close(place)
        return logs


@final
class _Lines:
    """The output of one worker as lines, as a terminal would finally show them."""

    def __init__(self) -> None:
        self.last: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._pending = b""

    @property
    def progress(self) -> bytes:
        """The line that is being rewritten over and over, if there is one."""
        line = _visible(self._pending) if b"\r" in self._pending else b""
        return harmless(line, colours=False)

    def add(self, chunk: bytes) -> list[bytes]:
        *whole, self._pending = (self._pending + chunk).split(b"\n")
        if len(self._pending) > _LONG:
            whole.append(self._pending)
            self._pending = b""
        elif b"\r" in self._pending:  # a progress bar, which may be rewritten for hours
            end = b"\r" if self._pending.endswith(b"\r") else b""
            self._pending = b"\r" + _visible(self._pending) + end
        return self._keep([_visible(line) for line in whole])

    def rest(self) -> list[bytes]:
        whole = [_visible(self._pending)] if self._pending else []
        self._pending = b""
        return self._keep(whole)

    def _keep(self, lines: list[bytes]) -> list[bytes]:
        lines = [harmless(line) for line in lines]
        self.last.extend(lines)
        return lines


def _visible(line: bytes) -> bytes:
    """Return the text that is not overwritten after a carriage return."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
