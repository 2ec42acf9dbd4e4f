"""What a reader sees: the machine, the versions, a table a cell."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from contestants._problem import Cell
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Measurement:
    """A contestant's rounds in one cell; `baseline` names the contestant it is divided by."""

    contestant: str
    baseline: str
    versions: Mapping[str, str]
    seconds_per_step: Sequence[float]
    last_loss: float


def print_header(console: Console) -> None:
    console.print(f"{os.cpu_count()} CPUs, {platform.system()} {platform.machine()}")


def print_cell(console: Console, cell: Cell, steps: int, measured: Sequence[Measurement]) -> None:
    by_name = {measurement.contestant: measurement for measurement in measured}
    for measurement in measured:
        versions = ", ".join(f"{name} {number}" for name, number in measurement.versions.items())
        console.print(f"{measurement.contestant}: {versions}")
    rounds = len(measured[0].seconds_per_step)
    table = Table(title=f"{cell}\n{rounds} interleaved rounds of {steps} steps")
    table.add_column("contestant", no_wrap=True)
    table.add_column("ms a step,\nmedian", justify="right")
    table.add_column("of a round:\nlow, high", justify="right")
    table.add_column("ratio of\nmedians", justify="right")
    table.add_column("of a round:\nlow, high", justify="right")
    for measurement in measured:
        table.add_row(*_row(measurement, by_name[measurement.baseline]))
    console.print(table)
    console.print("ratio: the contestant's time divided by that of replicax; above 1 it is slower")
    losses = ", ".join(f"{measurement.last_loss:.6f}" for measurement in measured)
    console.print(f"the losses agreed after every round; in the end they were {losses}")


def _row(peer: Measurement, baseline: Measurement) -> tuple[str, ...]:
    milliseconds = [1000 * seconds for seconds in peer.seconds_per_step]
    by_round = [
        mine / theirs
        for mine, theirs in zip(peer.seconds_per_step, baseline.seconds_per_step, strict=True)
    ]
    ratio = median(peer.seconds_per_step) / median(baseline.seconds_per_step)
    is_baseline = peer is baseline
    return (
        peer.contestant,
        f"{median(milliseconds):.2f}",
        f"{min(milliseconds):.2f}, {max(milliseconds):.2f}",
        "1" if is_baseline else f"{ratio:.2f}",
        "" if is_baseline else f"{min(by_round):.2f}, {max(by_round):.2f}",
    )
