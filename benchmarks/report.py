"""The report: the machine, the versions, tables."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

import click
from contestants._problem import AnyCell
from rich.console import Console
from rich.table import Table
from targets import Target

WIDTH = 104  # of the report, wherever it is printed


@dataclass(frozen=True)
class Measurement:
    """A contestant's rounds in one cell."""

    contestant: str
    versions: Mapping[str, str]
    seconds_per_step: Sequence[float]
    last_result: float  # for a training step, its loss
    first_step_seconds: Sequence[float] = ()  # one per sitting

    def ratios_to(self, baseline: Measurement) -> list[float]:
        """Return the ratios, round by round: what slows the machine in a round slows both."""
        return [
            mine / theirs
            for mine, theirs in zip(self.seconds_per_step, baseline.seconds_per_step, strict=True)
        ]


@dataclass(frozen=True)
class MeasuredCell:
    """All contestants of a cell; the times are divided by those of the first, the baseline."""

    cell: AnyCell
    steps: int  # per round
    measurements: Sequence[Measurement]

    @classmethod
    def of_sittings(
        cls, cell: AnyCell, steps: int, sittings: Sequence[Sequence[Measurement]]
    ) -> MeasuredCell:
        """Join the rounds of several sittings of the same contestants."""
        return cls(
            cell,
            steps,
            [
                replace(
                    parts[-1],
                    seconds_per_step=[time for part in parts for time in part.seconds_per_step],
                    first_step_seconds=[time for part in parts for time in part.first_step_seconds],
                )
                for parts in zip(*sittings, strict=True)
            ],
        )

    def each_of(self, parts: int) -> MeasuredCell:
        """Return the times per training step, if each measured step consists of so many of them."""
        return replace(
            self,
            steps=self.steps * parts,
            measurements=[
                replace(
                    measurement,
                    seconds_per_step=[seconds / parts for seconds in measurement.seconds_per_step],
                )
                for measurement in self.measurements
            ],
        )

    @property
    def baseline(self) -> Measurement:
        return self.measurements[0]

    def ratios_of(self, contestant: str) -> list[float]:
        by_name = {measurement.contestant: measurement for measurement in self.measurements}
        return by_name[contestant].ratios_to(self.baseline)

    def ratio_of(self, contestant: str) -> float:
        return median(self.ratios_of(contestant))


def announce(what: str) -> None:
    """Tell the user what is being measured; this is no part of the report."""
    click.echo(f"Measuring {what} …", err=True)


def describe_machine() -> str:
    """Return the date, the machine, and its load; so call this before measuring."""
    model = _cpu_model()
    load, _, _ = os.getloadavg()
    return (
        f"{datetime.date.today()}, {os.cpu_count()} CPUs{f' ({model})' if model else ''}, "
        f"{platform.system()} {platform.machine()}, load average before the run {load:.1f}"
    )


def _cpu_model() -> str | None:
    """Return the model as Linux reports it; None elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None


def print_versions(console: Console, versions: Mapping[str, Mapping[str, str]]) -> None:
    for name, packages in versions.items():
        listed = ", ".join(f"{package} {number}" for package, number in packages.items())
        console.print(f"{name}: {listed}", highlight=False)


def versions_of(cells: Sequence[MeasuredCell]) -> dict[str, Mapping[str, str]]:
    return {
        measurement.contestant: measurement.versions
        for measured in cells
        for measurement in measured.measurements
    }


def print_training(console: Console, title: str, cells: Sequence[MeasuredCell]) -> None:
    print_times(console, title, cells, unit="step")
    print_agreement(console, cells)


def print_agreement(console: Console, cells: Sequence[MeasuredCell]) -> None:
    """Print what the ratios are, and the losses, on which the contestants agreed."""
    baseline = cells[0].baseline.contestant
    console.print(
        f"ratio: the contestant's time divided by that of {baseline}; above 1 it is slower"
    )
    for measured in cells:
        losses = [measurement.last_result for measurement in measured.measurements]
        print_of_cell(
            console,
            measured.cell,
            f"the losses agreed after every round of {measured.steps} steps; in the end they were "
            f"{', '.join(f'{loss:.5f}' for loss in losses)}",
        )


def print_times(console: Console, title: str, cells: Sequence[MeasuredCell], *, unit: str) -> None:
    """Print the contestants' times for a unit of work, and the ratios."""
    rounds = len(cells[0].baseline.seconds_per_step)
    table = table_of(
        f"{title}, {rounds} interleaved rounds",
        "hidden,\nbatch",
        "replicas",
        "contestant",
        f"ms a {unit},\nmedian",
        "middle half\nof the rounds",
        "ratio,\nmedian",
        "middle half\nof the rounds",
        words=("contestant",),
    )
    for measured in cells:
        cell = measured.cell
        labels = [f"{cell.hidden}, {cell.global_batch}", str(cell.replicas)]
        for measurement in measured.measurements:
            table.add_row(*labels, *_times_row(measurement, measured.baseline))
            labels = ["", ""]
        table.add_section()
    console.print(table)


def print_of_cell(console: Console, cell: AnyCell, what: str) -> None:
    console.print(f"{cell}: {what}", highlight=False, soft_wrap=True)


def _times_row(peer: Measurement, baseline: Measurement) -> tuple[str, ...]:
    return (
        peer.contestant,
        milliseconds(median(peer.seconds_per_step)),
        spread(peer.seconds_per_step, milliseconds),
        *ratio_columns(peer, baseline),
    )


def ratio_columns(peer: Measurement, baseline: Measurement) -> tuple[str, str]:
    """Return the median of the ratios and their middle half, for two columns of a table."""
    if peer is baseline:
        return "1", ""
    ratios = peer.ratios_to(baseline)
    return f"{median(ratios):.2f}", spread(ratios, "{:.2f}".format)


def milliseconds(seconds: float) -> str:
    """Format milliseconds, with about three significant digits."""
    number = 1000 * seconds
    return f"{number:.2f}" if number < 10 else f"{number:.1f}" if number < 100 else f"{number:.0f}"


def print_targets(console: Console, targets: Sequence[Target]) -> None:
    table = table_of("Targets", "what", "wanted", "measured", "", words=("what", "wanted"))
    for target in targets:
        verdict = "met" if target.met else "missed"
        table.add_row(target.what, target.wanted, f"{target.measured:.2f}", verdict)
    console.print(table)


def print_picture(console: Console, what: str, path: Path, drawn: bool) -> None:
    console.print(
        f"{what} in {path}."
        if drawn
        else f"matplotlib is missing: {path} is left out. It comes with the extra `bench`."
    )


def table_of(title: str, *columns: str, words: Sequence[str] = ()) -> Table:
    """Make a table whose columns hold numbers, except those named in `words`."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", no_wrap=True)
    return table


def microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.0f}"


def spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    """Format the middle half of the values, for a cell of a table."""
    return ", ".join(text(value) for value in middle_half(values))


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """Return the two values between which the middle half of them lie."""
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high
