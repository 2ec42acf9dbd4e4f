"""Charts as SVG, which browsers draw without a library or a script."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import final

_WIDTH = 720
_LABELS = 100  # left of bars
_BAR, _GAP = 26, 14


@final
@dataclass(frozen=True, slots=True)
class Bar:
    """A bar made of consecutive pieces.

    Args:
      label: The text to the left of it.
      pieces: The kind and size of each; every kind has its own colour.
      limit: The size that must not be exceeded, which is marked.
    """

    label: str
    pieces: Sequence[tuple[str, float]]
    limit: float | None = None


def bars(title: str, rows: Sequence[Bar], show: Callable[[float], str]) -> str:
    """Draw bars one below another, on one scale; `show` formats sizes."""
    totals = [sum(size for _, size in row.pieces) for row in rows]
    largest = max([*totals, *(row.limit or 0.0 for row in rows)]) or 1.0
    scale = (_WIDTH - _LABELS - 180) / largest
    drawn = []
    for index, (row, total) in enumerate(zip(rows, totals, strict=True)):
        top = index * (_BAR + _GAP) + 4
        drawn.append(_text(_LABELS - 10, top + 18, row.label, "end"))
        left = float(_LABELS)
        for kind, size in row.pieces:
            width = size * scale
            if size:
                drawn.append(
                    f'<rect class="{escape(kind)}" x="{left:.1f}" y="{top}" '
                    f'width="{max(width, 0.5):.1f}" height="{_BAR}">'
                    f"<title>{escape(kind)}: {escape(show(size))}</title></rect>"
                )
            left += width
        if row.limit is not None:
            at = _LABELS + row.limit * scale
            drawn.append(
                f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" y1="{top - 4}" '
                f'y2="{top + _BAR + 4}"><title>there is: {escape(show(row.limit))}</title></line>'
            )
        end = max(left, _LABELS + (row.limit or 0.0) * scale)
        of = "" if row.limit is None else f" of {show(row.limit)}"
        drawn.append(_text(end + 8, top + 18, f"{show(total)}{of}"))
    return _svg(title, len(rows) * (_BAR + _GAP) + 8, drawn)


def legend(kinds: Sequence[str]) -> str:
    """Show which colour stands for which kind."""
    each = "".join(f'<span><i class="{escape(kind)}"></i>{escape(kind)}</span>' for kind in kinds)
    return f'<p class="legend">{each}</p>'


def curve(title: str, points: Sequence[tuple[float, float]], show: Callable[[float], str]) -> str:
    """Draw points and a line through them, on logarithmic scales; the ideal line is dashed.

    The ideal line starts at the first point and grows in proportion to x.
    """
    height, left, right, top, bottom = 300, 90, 40, 20, 44
    (x0, y0), (xn, _) = points[0], points[-1]
    ideal = [(x0, y0), (xn, y0 * xn / x0)]
    low = min(y for _, y in (*points, *ideal)) * 0.8
    high = max(y for _, y in (*points, *ideal)) * 1.25
    span = math.log(xn / x0) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / x0) / span if xn != x0 else 0.5
        up = math.log(y / low) / math.log(high / low)
        return left + across * (_WIDTH - left - right), height - bottom - up * (
            height - top - bottom
        )

    def line(kind: str, through: Sequence[tuple[float, float]]) -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in through))
        return f'<polyline class="{kind}" points="{path}"/>'

    floor = height - bottom
    drawn = [
        f'<line class="axis" x1="{left}" x2="{_WIDTH - right}" y1="{floor}" y2="{floor}"/>',
        line("ideal", ideal),
        line("real", points),
    ]
    for x, y in points:
        across, up = place(x, y)
        drawn.append(
            f'<circle class="real" cx="{across:.1f}" cy="{up:.1f}" r="5">'
            f"<title>{x:g} chips: {escape(show(y))}</title></circle>"
        )
        drawn.append(_text(across, up - 12, show(y), "middle"))
        drawn.append(_text(across, floor + 20, f"{x:g}", "middle"))
    drawn.append(_text((left + _WIDTH - right) / 2, height - 4, "chips", "middle"))
    return _svg(title, height, drawn)


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(title: str, height: int, drawn: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(drawn)}</svg>"
    )
