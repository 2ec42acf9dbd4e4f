"""Charts of HTML and SVG, which browsers draw without a library or a script."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import final

from replicax._units import of_share

_WIDTH, _HEIGHT = 420, 250  # narrow, so that words can be read on a phone
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 12, 44


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


def bars(rows: Sequence[Bar], show: Callable[[float], str]) -> str:
    """Draw bars one below another, on one scale; `show` formats sizes.

    Percentages are of the limit of a bar, or where there is none of all of it.
    """
    totals = [sum(size for _, size in row.pieces) for row in rows]
    largest = max([*totals, *(row.limit or 0.0 for row in rows)]) or 1.0
    drawn = ""
    for row, total in zip(rows, totals, strict=True):
        said = show(total)
        if row.limit is not None:
            said += f" of {show(row.limit)} ({of_share(total / row.limit)})"
        pieces = [(escape(kind), size) for kind, size in row.pieces if size]
        track = "".join(
            f'<i class="{kind}" style="width:{100 * size / largest:.2f}%"></i>'
            for kind, size in pieces
        )
        if row.limit is not None:
            track += f'<i class="limit" style="left:{100 * row.limit / largest:.2f}%"></i>'
        legend = "".join(
            f'<span><i class="{kind}"></i>{kind} {of_share(size / (row.limit or total))}</span>'
            for kind, size in pieces
            if size / (row.limit or total) >= 0.001
        )
        drawn += (
            f'<div class="bar"><p><b>{escape(row.label)}</b><span>{escape(said)}</span></p>'
            f'<div class="track">{track}</div><p class="legend">{legend}</p></div>'
        )
    return drawn


def curve(title: str, points: Sequence[tuple[float, float]], show: Callable[[float], str]) -> str:
    """Draw points and a line through them, on logarithmic scales; the ideal line is dashed.

    The ideal line starts at the first point and grows in proportion to x.
    """
    (x0, y0), (xn, _) = points[0], points[-1]
    ideal = [(x0, y0), (xn, y0 * xn / x0)]
    low = min(y for _, y in (*points, *ideal)) * 0.8
    high = max(y for _, y in (*points, *ideal)) * 1.25
    span = math.log(xn / x0) or 1.0
    floor, wall = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / x0) / span if xn != x0 else 0.5
        up = math.log(y / low) / math.log(high / low)
        return _LEFT + 16 + across * (wall - _LEFT - 16), floor - up * (floor - _TOP)

    def line(kind: str, through: Sequence[tuple[float, float]]) -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in through))
        return f'<polyline class="{kind}" points="{path}"/>'

    drawn = []
    for y in _ticks(low, high):
        _, up = place(x0, y)
        drawn.append(f'<line class="axis" x1="{_LEFT}" x2="{wall}" y1="{up:.1f}" y2="{up:.1f}"/>')
        drawn.append(_text(_LEFT - 8, up + 4, show(y), "end"))
    drawn += [line("ideal", ideal), line("real", points)]
    for x, y in points:
        across, up = place(x, y)
        drawn.append(
            f'<circle class="real" cx="{across:.1f}" cy="{up:.1f}" r="4">'
            f"<title>{x:g} chips: {escape(show(y))}</title></circle>"
        )
    for x in sorted({x for x, _ in points}):
        drawn.append(_text(place(x, y0)[0], floor + 20, f"{x:g}", "middle"))
    drawn.append(_text((_LEFT + wall) / 2, _HEIGHT - 6, "chips", "middle"))
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{''.join(drawn)}</svg>"
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two others: powers of ten and their 2 and 5, or finer ones."""
    tens = [
        10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    ]
    coarse, fine = (
        [digit * ten for ten in [*tens, tens[-1] * 10] for digit in digits]
        for digits in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9))
    )
    coarse = [y for y in coarse if low <= y <= high]
    return coarse if len(coarse) > 2 else [y for y in fine if low <= y <= high]


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
