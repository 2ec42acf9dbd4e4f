"""The ratios of the compiled cells as a picture; the only part that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from report import MeasuredCell, middle_half

WIDTH_OF_A_GROUP = 0.84
TICKS = (0.5, 1, 2, 4, 8, 16)


def draw_ratios(path: Path, cells: Sequence[MeasuredCell]) -> bool:
    """Write the picture to `path`; return False, and write nothing, if matplotlib is missing."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

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
