"""Cost as work grows: what a step costs, against what there is more and more of.

`python benchmarks/growth.py` prints these tables alone; run.py prints them among the others, and
draws the picture. Every measurement is a new process, so that its memory is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import click
from contestants._tiny_program import BYTES_OF_A_ROW, Program
from curves import Curve, Panel
from plot import draw_growth
from report import WIDTH, describe_machine, print_picture, print_versions, table_of
from rich.console import Console
from tiny_steps import CONTESTANTS, TinyStep, TinyTimes, measure_tiny_step

PICTURE = Path(__file__).with_name("growth.svg")
REPLICAS = 2
PROGRAM = Program(variables=10)
BASE = TinyStep(PROGRAM, REPLICAS, rounds=5, calls=30, compiles=1)
ROUNDS = 3
BOTH = "both"  # in one process
NAMES = {"replicax": "replicax", "jax": "by hand", BOTH: "added"}


@dataclass(frozen=True)
class Axis:
    """What grows, how far, and the step of a size; everything else is as in `BASE`."""

    what: str
    sizes: Sequence[int]
    step_of: Callable[[int], TinyStep]


AXES = {
    "variables": Axis(
        "variables",
        (10, 30, 100, 300, 1000, 2000),
        lambda count: replace(BASE, program=replace(PROGRAM, variables=count)),
    ),
    "replicas": Axis(
        "replicas", (1, 2, 4, 8, 16, 32, 64), lambda count: replace(BASE, replicas=count)
    ),
    "workers": Axis(
        "workers", (1, 2, 3, 4), lambda count: replace(BASE, replicas=count, workers=count)
    ),
    "bytes": Axis(
        "bytes of the batch",
        (2**10, 2**14, 2**18, 2**22, 2**26),
        lambda count: replace(
            BASE, program=replace(PROGRAM, rows=count // BYTES_OF_A_ROW // REPLICAS)
        ),
    ),
    "layers": Axis(
        "layers",
        (1, 3, 10, 30, 100, 300),
        lambda count: replace(BASE, program=replace(PROGRAM, layers=count)),
    ),
}
QUICK_SIZES = 2
QUICK_AXES = ("variables", "workers")  # of run.py


@dataclass(frozen=True)
class Cost:
    """A cost of a step: the processes that tell it, and its number in the answer of one."""

    what: str
    processes: Sequence[str]
    number: Callable[[TinyTimes, str], float]


COSTS = (
    Cost("step time, us", CONTESTANTS, lambda times, name: 1e6 * median(times.later_calls[name])),
    Cost("host time, us", (BOTH,), lambda times, _: 1e6 * times.overhead),
    Cost(
        "compile time, ms", CONTESTANTS, lambda times, name: 1e3 * median(times.first_calls[name])
    ),
    Cost("peak memory, MB", CONTESTANTS, lambda times, _: times.peak_bytes / 1e6),
)


@dataclass(frozen=True)
class Growth:
    """The answers at each size of an axis: those of the new processes of each round, by kind."""

    axis: Axis
    answers: Mapping[int, Mapping[str, Sequence[TinyTimes]]]

    @property
    def panels(self) -> list[Panel]:
        """The medians over the rounds, a panel for each cost."""
        return [
            Panel(
                self.axis.what,
                cost.what,
                [self._curve(cost, process) for process in cost.processes],
            )
            for cost in COSTS
        ]

    @property
    def versions(self) -> Mapping[str, str]:
        return next(iter(self.answers.values()))[BOTH][0].versions

    def _curve(self, cost: Cost, process: str) -> Curve:
        costs = [
            median(cost.number(times, process) for times in answers[process])
            for answers in self.answers.values()
        ]
        return Curve(NAMES[process], list(self.answers), costs)


def measure_growth(
    rounds: int = ROUNDS, names: Iterable[str] = AXES, most_sizes: int | None = None
) -> list[Growth]:
    """Measure the axes of these names, at the first `most_sizes` of their sizes."""
    return [
        Growth(
            AXES[name],
            {
                size: _measure(AXES[name].step_of(size), rounds)
                for size in AXES[name].sizes[:most_sizes]
            },
        )
        for name in names
    ]


def _measure(step: TinyStep, rounds: int) -> dict[str, list[TinyTimes]]:
    asked = {name: replace(step, contestants=(name,), collective=True) for name in CONTESTANTS}
    # Host time is a small difference, which is taken call by call in one process. There is no
    # collective in these calls, and nothing to know of their compilation.
    asked[BOTH] = replace(step, compiles=0)
    answers: dict[str, list[TinyTimes]] = {process: [] for process in asked}
    for number in range(rounds):
        for process in asked if number % 2 == 0 else reversed(asked):
            answers[process].append(measure_tiny_step(asked[process]))
    return answers


def print_growth(console: Console, measured: Sequence[Growth]) -> None:
    for growth in measured:
        curves = [(panel.cost, curve) for panel in growth.panels for curve in panel.curves]
        rounds = len(next(iter(growth.answers.values()))[BOTH])
        table = table_of(
            f"Cost by {growth.axis.what}, rounds: {rounds}",
            "size",
            *("\n".join([curve.label, *cost.split(" ", 1)]) for cost, curve in curves),
        )
        for number, size in enumerate(growth.answers):
            table.add_row(f"{size:,}", *(f"{curve.costs[number]:,.0f}" for _, curve in curves))
        table.add_section()
        table.add_row("exponent", *(f"{curve.exponent:z.2f}" for _, curve in curves))
        console.print(table)
    console.print(
        "host time: what a call adds to that of the bare jax.jit; compile time: the first call, "
        "until it is done; exponent: p of the power law size**p that fits best"
    )


def draw_picture(console: Console, path: Path, measured: Sequence[Growth]) -> None:
    drawn = draw_growth(path, [growth.panels for growth in measured])
    print_picture(console, "Cost as work grows is drawn", path, drawn)


@click.command()
@click.option("--rounds", default=ROUNDS, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--axis",
    "axes",
    multiple=True,
    type=click.Choice(tuple(AXES)),
    help="Only this; may be repeated.",
)
@click.option(
    "--quick",
    is_flag=True,
    help=f"To see that it works: the {QUICK_SIZES} smallest sizes of each axis, one round.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Also draws the axes into this file; needs matplotlib (the extra `bench`).",
)
def main(rounds: int, axes: Sequence[str], quick: bool, plot: Path | None) -> None:
    """Measure what a step costs as work grows."""
    console = Console(width=WIDTH)
    console.print(describe_machine(), highlight=False)
    measured = measure_growth(1 if quick else rounds, axes or AXES, QUICK_SIZES if quick else None)
    print_versions(console, {"replicax": measured[0].versions})
    print_growth(console, measured)
    if plot is not None:
        draw_picture(console, plot, measured)


if __name__ == "__main__":
    main()
