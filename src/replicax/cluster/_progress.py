"""What this worker is doing, for those who wait for it."""

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

from replicax.cluster._messages import Report

_FRAMES = 3  # of the stack, in reports
_LABEL = 2000  # characters of a label
_LIBRARIES = tuple(
    str(Path(path).resolve())
    for path in (
        sysconfig.get_path("purelib"),
        sysconfig.get_path("stdlib"),
        Path(__file__).parents[1],
    )
)


def is_users(filename: str) -> bool:
    """Whether a file is part of the program, and not of a library."""
    return not filename.startswith((*_LIBRARIES, "<frozen"))


@final
@dataclass(frozen=True, slots=True)
class Waiting:
    """For what the program waits, and since when."""

    label: str
    since: float
    topic: str | None = None  # if it waits for what others have to say


@final
class Progress:
    """Counts what the workers do together: the numbers of all are the same at the same point."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident or 0
        self.number = 0
        self.label = "the start"
        self._waiting: Waiting | None = None
        self._element_since: float | None = None
        self._input: dict[str, Waiting] = {}
        self._threads: WeakSet[threading.Thread] = WeakSet()

    @contextmanager
    def together(self, label: str, topic: str | None = None) -> Iterator[Waiting]:
        """Something for which the program needs all workers."""
        self.number += 1
        self._threads.add(threading.current_thread())
        self.label = label[:_LABEL]
        self._waiting = waiting = Waiting(self.label, time.monotonic(), topic)
        try:
            yield waiting
        finally:
            self._waiting = None

    def takes_part(self, thread: threading.Thread) -> bool:
        """Return whether a thread has done something together with other workers."""
        return thread in self._threads

    @contextmanager
    def for_element(self) -> Iterator[None]:
        """The program waits for an element of a dataset."""
        self._element_since = time.monotonic()
        try:
            yield
        finally:
            self._element_since = None

    @contextmanager
    def for_input(self, topic: str) -> Iterator[None]:
        """A thread that reads ahead waits for the other workers' input."""
        self._input[topic] = Waiting("the input of a step", time.monotonic(), topic)
        try:
            yield
        finally:
            del self._input[topic]

    @property
    def waiting(self) -> Waiting | None:
        """For what it needs others, if it cannot go on without them.

        A thread that reads ahead may wait as long as it likes while the program is busy.
        """
        if self._waiting is not None:
            return self._waiting
        since = self._element_since
        for waiting in list(self._input.values()):
            if since is not None:
                return Waiting(waiting.label, max(since, waiting.since), waiting.topic)
        return None

    def report(self) -> Report:
        """Return what this worker is doing."""
        waiting = self.waiting
        return Report(
            number=self.number,
            label=self.label,
            waits=None if waiting is None else waiting.label,
            seconds=0.0 if waiting is None else time.monotonic() - waiting.since,
            where=tuple(self._where()),
        )

    def _where(self) -> list[str]:
        """Where the main thread stands, innermost first: the user's code, or else the library's."""
        frame = sys._current_frames().get(self._main)
        lines: list[tuple[bool, str]] = []
        while frame is not None:
            code = frame.f_code
            text = f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
            lines.append((is_users(code.co_filename), text))
            frame = frame.f_back
        own = [text for users, text in lines if users]
        return (own or [text for _, text in lines])[:_FRAMES]
