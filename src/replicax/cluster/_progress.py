"""The activity of this worker, for the workers that wait for it."""

from __future__ import annotations

import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import final
from weakref import WeakSet

from replicax.cluster._messages import Look, Report

_FRAMES = 3  # the frames that a report shows
_LABEL = 2000  # characters of a label
_LIBRARIES = tuple(
    str(form)
    for path in (
        sysconfig.get_path("purelib"),
        sysconfig.get_path("stdlib"),
        Path(__file__).parents[1],
    )
    # A module may have been imported by either path, because environments are often behind links.
    for form in {Path(path), Path(path).resolve()}
)


def is_users(filename: str) -> bool:
    """Return whether a file is part of the user's program rather than of a library."""
    return not filename.startswith((*_LIBRARIES, "<frozen"))


@final
@dataclass(frozen=True, slots=True)
class Waiting:
    """The operation that the program waits for, and the time at which the wait began."""

    label: str
    since: float
    topic: str | None = None  # if it waits for values of other workers


@final
class Progress:
    """A count of joint operations, equal on all workers at the same point of the program."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self.number = 0
        self.label = "the start"
        self.look: Look | None = None  # the last test of which workers this one can reach
        self._waiting: Waiting | None = None
        self._element_since: float | None = None
        self._reader: threading.Thread | None = None
        self._input: dict[str, Waiting] = {}
        self._threads: WeakSet[threading.Thread] = WeakSet()

    @contextmanager
    def together(self, label: str, topic: str | None = None) -> Iterator[Waiting]:
        """Note, for a `with` block, that the program needs all workers."""
        self.number += 1
        self._threads.add(threading.current_thread())
        self.label = label[:_LABEL]
        self._waiting = waiting = Waiting(self.label, time.monotonic(), topic)
        try:
            yield waiting
        finally:
            self._waiting = None

    def takes_part(self, thread: threading.Thread) -> bool:
        """Return whether a thread has taken part in a joint operation."""
        return thread in self._threads

    @contextmanager
    def for_element(self, reader: threading.Thread) -> Iterator[None]:
        """Note, for a `with` block, that the program waits for an element that a thread reads."""
        self._element_since, self._reader = time.monotonic(), reader
        try:
            yield
        finally:
            self._element_since = self._reader = None

    @contextmanager
    def for_input(self, topic: str) -> Iterator[None]:
        """Note, for a `with` block, that a prefetching thread waits for other workers' input."""
        self._input[topic] = Waiting("the input of a step", time.monotonic(), topic)
        try:
            yield
        finally:
            del self._input[topic]

    @property
    def waiting(self) -> Waiting | None:
        """The operation that needs other workers, if the program cannot continue without them.

        A prefetching thread may wait as long as it likes while the program is busy.
        """
        if self._waiting is not None:
            return self._waiting
        since = self._element_since
        for waiting in list(self._input.values()):
            if since is not None:
                return Waiting(waiting.label, max(since, waiting.since), waiting.topic)
        return None

    def report(self) -> Report:
        """Return the current activity of this worker."""
        waiting = self.waiting
        return Report(
            number=self.number,
            label=self.label,
            waits=None if waiting is None else waiting.label,
            seconds=0.0 if waiting is None else time.monotonic() - waiting.since,
            where=tuple(self._where()),
            look=self.look,
        )

    def _where(self) -> list[str]:
        """Return the lines of the reader that is awaited, if any, then those of the main thread."""
        users, others = _lines_of(self._main)
        where = (users or others)[:_FRAMES]
        reader = self._reader
        if reader is None or self._input:  # the input, if any, waits for other workers' input
            return where
        # If Grain reads in threads of its own, the user's code runs in one of those.
        helpers = [each for each in threading.enumerate() if each.name.startswith("grain")]
        found = [_lines_of(thread.ident) for thread in (reader, *helpers)]
        lines = next((users for users, _ in found if users), found[0][1])[:_FRAMES]
        return [f"{line} (reading its input)" for line in lines] + where


def _lines_of(thread: int | None) -> tuple[list[str], list[str]]:
    """Return a thread's current lines, innermost first: the user's, then those of libraries."""
    frame = sys._current_frames().get(thread or 0)
    users: list[str] = []
    others: list[str] = []
    while frame is not None:
        code = frame.f_code
        lines = users if is_users(code.co_filename) else others
        lines.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
        frame = frame.f_back
    return users, others
