"""The line at the bottom of a terminal that says how the workers are doing."""

from __future__ import annotations

import contextlib
import time
from typing import IO, TYPE_CHECKING, final

if TYPE_CHECKING:
    from rich.text import Text


@final
class Status:
    """The state of the workers, which the rest of the launcher keeps up to date."""

    def __init__(self, workers: int, max_restarts: int) -> None:
        self._workers = workers
        self._max_restarts = max_restarts
        self.attempt = 0
        self.running = 0
        self.since = time.monotonic()
        self.doing = ""
        self.progress: dict[int, str] = {}  # the lines that workers keep rewriting

    @property
    def name(self) -> str:
        """The launcher's name in its messages."""
        return f"launcher, attempt {self.attempt}" if self._max_restarts else "launcher"

    def __str__(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.since), 60)
        parts = [f"{self.running} of {self._workers} workers running", f"{minutes}:{seconds:02}"]
        if self._max_restarts:
            left = self._max_restarts - self.attempt
            parts.append(f"attempt {self.attempt} · restarts left: {left}")
        if self.doing:
            parts.append(self.doing)
        if self.progress:
            parts.append(self.progress[min(self.progress)])
        return " · ".join(parts)


@final
class StatusLine:
    """A line that keeps a status below everything else in a terminal."""

    def __init__(self, terminal: IO[str], status: Status) -> None:
        from rich.console import Console  # takes 50 ms, so it is imported for terminals only
        from rich.live import Live

        self._status = status
        self._console = Console(file=terminal, force_terminal=True)
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def start(self) -> None:
        with contextlib.suppress(OSError):  # the terminal was closed
            self._live.start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._live.stop()

    def write_above(self, text: str) -> None:
        """Write whole lines unchanged, and the status below them again."""
        from rich.segment import Segment, Segments

        with contextlib.suppress(OSError):
            self._console.print(Segments([Segment(text)]), end="", soft_wrap=True)

    def _render(self) -> Text:
        from rich.text import Text

        return Text(str(self._status), style="bold", no_wrap=True, overflow="ellipsis")
