"""Tables on a terminal. `rich` takes 50 ms to import, so import this only to show a table."""

from __future__ import annotations

import io

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table


def empty_table(title: str) -> Table:
    """Return a table without columns, in the style of all our tables."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=SIMPLE_HEAD,
        show_edge=False,
    )


def as_text(shown: RenderableType) -> str:
    """Return what a terminal of 100 columns would show, without colours."""
    file = io.StringIO()
    Console(file=file, width=100, color_system=None).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
