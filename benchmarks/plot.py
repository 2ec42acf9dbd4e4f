"""The pictures; the only part that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curves import Panel
from report import MeasuredCell, middle_half

WIDTH_OF_A_GROUP = 0.84
TICKS = (0.5, 1, 2, 4, 8, 16)
INCHES_OF_A_PANEL = (3.6, 2.6)


def draw_growth(path: Path, rows: Sequence[Sequence[Panel]]) -> bool:
    """Write the panels to `path`; return False, and write nothing, if matplotlib is missing.

    The scales are logarithmic: a power law is a straight line.
    """
    pyplot = _pyplot()
    if pyplot is None:
        return False
    from matplotlib import ticker

    width, height = INCHES_OF_A_PANEL
    figure, all_axes = pyplot.subplots(
        len(rows),
        len(rows[0]),
        figsize=(width * len(rows[0]), height * len(rows)),
        layout="constrained",
        squeeze=False,
    )
    for row, row_axes in zip(rows, all_axes, strict=True):
        for panel, axes in zip(row, row_axes, strict=True):
            for curve in panel.curves:
                label = f"{curve.label}, exponent {curve.exponent:z.2f}"
                axes.plot(curve.sizes, curve.costs, marker="o", markersize=3, label=label)
            axes.set_xscale("log")
            axes.set_xticks(panel.curves[0].sizes)
            axes.xaxis.set_major_formatter(ticker.EngFormatter(places=0, sep=""))
            axes.xaxis.set_minor_locator(ticker.NullLocator())
            axes.set_yscale("log", nonpositive="mask")
            axes.yaxis.set_major_formatter(ticker.LogFormatter())
            axes.yaxis.set_minor_formatter(ticker.LogFormatter(minor_thresholds=(1.5, 0.5)))
            axes.set_xlabel(panel.what_grows)
            axes.set_title(panel.cost, fontsize=10)
            axes.margins(y=0.3)
            axes.legend(frameon=False, fontsize=8)
            axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def draw_ratios(path: Path, cells: Sequence[MeasuredCell]) -> bool:
    """Write the ratios of the compiled cells to `path`, likewise."""
    pyplot = _pyplot()
    if pyplot is None:
        return False
    from matplotlib import ticker

    baseline, *peers = [measurement.contestant for measurement in cells[0].measurements]
    width = WIDTH_OF_A_GROUP / len(peers)
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for number, peer in enumerate(peers):
        offset = (number - (len(peers) - 1) / 2) * width
        for group, measured in enumerate(cells):
            ratio = measured.ratio_of(peer)
            low, high = middle_half(measured.ratios_of(peer))
            place = group + offset
            # Bars begin at the line at 1, and go up or down.
            axes.bar(
                place,
                ratio - 1,
                width,
                bottom=1,
                color=f"C{number}",
                label=peer if group == 0 else None,
            )
            axes.vlines(place, low, high, color="black", linewidth=0.8)
            axes.annotate(
                f"{ratio:.2f}",
                (place, max(1, ratio, high)),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(ticker.FixedLocator(TICKS))
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.margins(y=0.12)
    axes.set_xticks(
        range(len(cells)),
        [f"hidden {one.cell.hidden}\n{one.cell.replicas} replicas" for one in cells],
    )
    axes.set_ylabel("time of a step, relative")
    axes.set_title(
        f"Compiled training step, peer / {baseline} (above 1: the peer is slower)\n"
        "bars: median of the rounds; lines: the middle half of the rounds",
        fontsize=10,
    )
    figure.legend(frameon=False, ncols=len(peers), loc="outside lower center")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _pyplot() -> Any | None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        return None
    matplotlib.use("agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # letters as letters: a smaller file
    from matplotlib import pyplot

    return pyplot
