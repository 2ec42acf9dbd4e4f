"""The format of the doctor's report: coloured in a terminal, else plain, one line per check."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Callable, Sequence
from typing import final

from rich.console import Console
from rich.text import Text

from replicax.doctor._check import Check, Verdict

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}
_NAMES = 18  # columns; the longest name of a check that is always there has 16
_INDENT = " " * (2 + 9 + _NAMES)
_NARROWEST = 40  # a terminal with less room for text breaks lines itself


@final
class Report:
    """A printer of sections as they come, which counts problems."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.problems = 0

    def section(self, title: str, examine: Callable[[], Sequence[Check]]) -> None:
        """Print the findings of `examine`, which may take a while."""
        self._print(Text(title, style="bold"))
        terminal = self._console.is_terminal  # anywhere else the status would be a line of its own
        with self._console.status("looking") if terminal else contextlib.nullcontext():
            checks = examine()
        for check in checks:
            self._print_check(check)
        self._print(Text())

    def conclude(self) -> None:
        """Say how it all went."""
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
