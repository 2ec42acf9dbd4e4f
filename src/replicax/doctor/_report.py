"""The format of the doctor's report: one line per check, coloured in a terminal."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Sequence
from typing import final

from rich.console import Console
from rich.text import Text

from replicax.doctor._check import Check, Verdict

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}
_NAMES = 18  # columns; the longest name that is always shown has 16
_INDENT = " " * (2 + 9 + _NAMES)
_NARROWEST = 40  # a terminal with less room for text is left to break lines


@final
class Report:
    """A printer that shows each section when it is ready, and counts problems."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.problems = 0

    def section(self, title: str, examine: Callable[[], Sequence[Check]]) -> None:
        """Print the findings of `examine`, which may take a while."""
        self._print(Text(title, style="bold"))
        terminal = self._console.is_terminal  # elsewhere the status would be a line of its own
        with self._console.status("looking") if terminal else contextlib.nullcontext():
            checks = examine()
        for check in checks:
            self._print_check(check)
        self._print(Text())

    def conclude(self) -> None:
        """Print the number of problems."""
        if self.problems:
            plural = "" if self.problems == 1 else "s"
            self._print(Text(f"{self.problems} problem{plural}.", style=_STYLES[Verdict.PROBLEM]))
        else:
            self._print(Text("No problems.", style=_STYLES[Verdict.OK]))

    def _print_check(self, check: Check) -> None:
        self.problems += check.verdict is Verdict.PROBLEM
        head = Text("  ")
        head.append(f"{check.verdict.value:<9}", style=_STYLES[check.verdict])
        head.append(f"{check.name:<{_NAMES - 1}} ")
        first, *rest = self._wrapped(check.found)
        self._print(head + Text(first))
        for line in [*rest, *(self._wrapped(check.advice) if check.advice else [])]:
            self._print(Text(_INDENT + line))

    def _wrapped(self, text: str) -> list[str]:
        lines = text.splitlines() or [""]
        room = self._console.width - len(_INDENT)
        if not self._console.is_terminal or room < _NARROWEST:
            return lines
        return [part for line in lines for part in textwrap.wrap(line, room) or [""]]

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)
