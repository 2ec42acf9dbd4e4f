"""The cost of a step whose replicas have different numbers of rows, such as the last of an epoch.

`python benchmarks/uneven_steps.py` prints this table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import click
from processes import ask
from report import (
    WIDTH,
    announce,
    describe_machine,
    print_targets,
    print_versions,
    spread,
    table_of,
)
from rich.console import Console
from targets import Target

NAMES = {"optax": "2 layers, rx.Optimizer", "keras": "Keras, small convnet"}
AT_MOST_SECONDS = {"optax": 1.0, "keras": 2.0}  # for the first uneven step


@dataclass(frozen=True)
class UnevenTimes:
    """The times of one model, with its uneven steps compiled or eager."""

    model: str
    eager: bool
    first_full: float
    first: float
    compilations: int
    full: Sequence[float]
    uneven: Sequence[float]
    versions: Mapping[str, str]

    @property
    def ratios(self) -> list[float]:
        """The time of an uneven step, in full steps, in each round."""
        return [mine / full for mine, full in zip(self.uneven, self.full, strict=True)]


def measure_uneven(rounds: int, models: Sequence[str] = tuple(NAMES)) -> list[UnevenTimes]:
    measured = []
    for model in models:
        for eager in (False, True):
            announce(f"uneven steps, {NAMES[model]}, {'eager' if eager else 'compiled'}")
            question = {"model": model, "eager": eager, "rounds": rounds}
            measured.append(UnevenTimes(model, eager, **ask("uneven_step.py", question)))
    return measured


def print_uneven(console: Console, measured: Sequence[UnevenTimes]) -> None:
    table = table_of(
        f"31 and 30 of 61 rows after batches of 64, 2 replicas, {len(measured[0].full)} rounds",
        "model",
        "uneven",
        "first\nfull, s",
        "first\nuneven, s",
        "programs\ncompiled",
        "later, in\nfull steps",
        "middle half\nof the rounds",
        words=("model", "uneven"),
    )
    for times in measured:
        table.add_row(
            NAMES[times.model],
            "eager" if times.eager else "compiled",
            f"{times.first_full:.2f}",
            f"{times.first:.2f}",
            str(times.compilations),
            f"{median(times.ratios):.2f}",
            spread(times.ratios, "{:.2f}".format),
        )
    console.print(table)


def uneven_targets(measured: Sequence[UnevenTimes]) -> list[Target]:
    return [
        Target.at_most(
            f"s for the first uneven step, {NAMES[times.model]}",
            AT_MOST_SECONDS[times.model],
            times.first,
        )
        for times in measured
        if not times.eager
    ]


@click.command()
@click.option("--rounds", default=30, show_default=True, type=click.IntRange(min=2))
def main(rounds: int) -> None:
    """Time steps with 61 rows over two replicas, compiled and eager, against full ones."""
    console = Console(width=WIDTH)
    console.print(describe_machine(), highlight=False)
    measured = measure_uneven(rounds)
    print_versions(console, {"replicax": measured[0].versions})
    print_uneven(console, measured)
    print_targets(console, uneven_targets(measured))


if __name__ == "__main__":
    main()
