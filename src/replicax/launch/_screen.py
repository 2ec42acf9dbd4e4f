"""The launcher's output: lines of workers to stdout, its own messages to stderr."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO, final

from replicax.launch._status import Status, StatusLine

# Red is reserved for failures.
_COLOURS = (b"36", b"32", b"33", b"35", b"34", b"96", b"92", b"95")
_PLAIN = b"\x1b[0m"


@final
class Screen:
    """Both output streams of this process; in a terminal, with colours and a status at the bottom.

    A run continues if the streams are closed: hours of work must not end with a pager.
    """

    def __init__(self, status: Status) -> None:
        self._status = status
        terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._coloured = terminal and not os.environ.get("NO_COLOR")
        self._speaking = threading.Lock()
        self._out = _Stream(sys.stdout)
        self._messages = _Stream(sys.stderr)
        self._line = StatusLine(sys.stdout, status) if terminal else None

    def __enter__(self) -> Screen:
        if self._line is not None:
            self._line.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._line is not None:
            self._line.stop()

    def show(self, worker: int, lines: Sequence[bytes]) -> None:
        """Write a worker's lines."""
        if not lines:
            return
        prefix, end = b"[worker %d] " % worker, b"\n"
        if self._coloured:
            prefix = b"\x1b[%bm%b%b" % (_COLOURS[worker % len(_COLOURS)], prefix, _PLAIN)
            end = _PLAIN + end  # ends any colour that the worker may have left on
        text = b"".join(prefix + line + end for line in lines)
        if self._line is not None:
            self._line.write_above(text.decode(errors="replace"))
        else:
            self._out.write(text)

    def show_progress(self, worker: int, line: bytes) -> None:
        """Show in the status the line that a worker keeps rewriting; an empty one removes it."""
        if line:
            self._status.progress[worker] = line.decode(errors="replace")
        else:
            self._status.progress.pop(worker, None)

    def say(self, message: str) -> None:
        """Write a message from the launcher."""
        text = f"[{self._status.name}] {message}\n".encode()
        with self._speaking:
            if self._line is None:
                self._messages.write(text)
                return
            self._line.stop()
            self._messages.write(text)
            self._line.start()


@final
class _Stream:
    """A stream of bytes without a buffer, whose flush at exit could fail."""

    def __init__(self, stream: IO[str]) -> None:
        stream.flush()
        buffer = getattr(stream, "buffer", None)
        self._raw = getattr(buffer, "raw", buffer)
        self._text = stream

    def write(self, text: bytes) -> None:
        try:
            if self._raw is None:  # the stream was replaced by something else
                self._text.write(text.decode(errors="replace"))
                return
            left = memoryview(text)
            while left:
                written = self._raw.write(left)
                if written is None:  # it was made non-blocking, and is full
                    time.sleep(0.01)
                left = left[written or 0 :]
        except (OSError, ValueError):  # its reader has ended, or it was closed
            return
