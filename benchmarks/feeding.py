"""The cost of distributed input: under a training step, by itself, and with a slow source.

`python benchmarks/feeding.py` prints these tables alone; run.py prints them among the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
from contestants._problem import Cell
from options import peer_environments_option, rounds_option, sittings_option
from processes import ask
from report import (
    WIDTH,
    MeasuredCell,
    Measurement,
    announce,
    describe_machine,
    print_of_cell,
    print_targets,
    print_times,
    print_versions,
    spread,
    table_of,
    versions_of,
)
from rich.console import Console
from targets import Target
from training import TENSORFLOW, Contestant, measure_cell

# The other's time is divided by that of the first.
ITERATING = (
    Contestant("replicax_input"),
    Contestant("tensorflow_input", TENSORFLOW),
)
FED_CELLS = tuple(Cell(hidden=512, global_batch=256, replicas=replicas) for replicas in (2, 4))
# Rounds of the fed step for each round of the others: the effect to detect is a twentieth, and the
# noise of a round is more than that.
FED_ROUNDS = 4
FED_STEPS = 10
ITERATING_STEPS = 200
EPOCH_STEPS = 200
SOURCE_SECONDS = STEP_SECONDS = 0.005
LONGER_SECONDS = EPOCH_STEPS * max(SOURCE_SECONDS, STEP_SECONDS)
SUM_SECONDS = EPOCH_STEPS * (SOURCE_SECONDS + STEP_SECONDS)
AT_MOST_FED = 1.05
AT_LEAST_ITERATING = 2
AT_MOST_SLOW = 1.15


@dataclass(frozen=True)
class SlowEpochs:
    """Seconds of epochs over the slow source."""

    cell: Cell
    seconds: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """The ratios to the time of the slower of source and step alone."""
        return [seconds / LONGER_SECONDS for seconds in self.seconds]


@dataclass(frozen=True)
class Feeding:
    """All measurements of each cell."""

    fed: Sequence[MeasuredCell]
    iterated: Sequence[MeasuredCell]
    slow: Sequence[SlowEpochs]


def measure_feeding(
    sittings: int, rounds: int, peer_environments: Path, cells: Sequence[Cell] = FED_CELLS
) -> Feeding:
    return Feeding(
        fed=[_measure_fed(cell, sittings, rounds) for cell in cells],
        iterated=[
            measure_cell(ITERATING, cell, sittings, rounds, ITERATING_STEPS, peer_environments)
            for cell in cells
        ],
        slow=[_measure_slow(cell, rounds) for cell in cells],
    )


def _measure_fed(cell: Cell, sittings: int, rounds: int) -> MeasuredCell:
    announce(f"a fed step, {cell}")
    question = {"cell": asdict(cell), "rounds": FED_ROUNDS * rounds, "steps": FED_STEPS}
    answers = [ask("fed_step.py", question) for _ in range(sittings)]
    measured = [
        [
            Measurement(name, answer["versions"], **times)
            for name, times in answer["contestants"].items()
        ]
        for answer in answers
    ]
    return MeasuredCell.of_sittings(cell, FED_STEPS, measured)


def _measure_slow(cell: Cell, epochs: int) -> SlowEpochs:
    announce(f"a slow source, {cell}")
    question = {
        "cell": asdict(cell),
        "epochs": epochs,
        "steps": EPOCH_STEPS,
        "source_seconds": SOURCE_SECONDS,
        "step_seconds": STEP_SECONDS,
    }
    return SlowEpochs(cell, ask("slow_source.py", question)["epoch_seconds"])


def print_feeding(console: Console, measured: Feeding) -> None:
    print_times(
        console, "Compiled training step, fed by a distributed dataset", measured.fed, unit="step"
    )
    console.print("ratio: to the time of the same step on a batch that is on the devices already")
    print_times(console, "Iterating alone", measured.iterated, unit="batch")
    console.print("ratio: replicax's batches a second divided by the contestant's")
    for iterated in measured.iterated:
        rates = ", ".join(
            f"{1 / median(measurement.seconds_per_step):,.0f} ({measurement.contestant})"
            for measurement in iterated.measurements
        )
        print_of_cell(console, iterated.cell, f"{rates} batches a second; their rows agreed")
    _print_slow(console, measured.slow)


def _print_slow(console: Console, measured: Sequence[SlowEpochs]) -> None:
    table = table_of(
        f"{EPOCH_STEPS} steps of {1e3 * STEP_SECONDS:g} ms, batches that take "
        f"{1e3 * SOURCE_SECONDS:g} ms each, {len(measured[0].seconds)} epochs",
        "replicas",
        "s an epoch,\nmedian",
        "middle half\nof the epochs",
        "ratio,\nmedian",
        "middle half\nof the epochs",
    )
    for epochs in measured:
        table.add_row(
            str(epochs.cell.replicas),
            f"{median(epochs.seconds):.2f}",
            spread(epochs.seconds, "{:.2f}".format),
            f"{median(epochs.ratios):.2f}",
            spread(epochs.ratios, "{:.2f}".format),
        )
    console.print(table)
    console.print(
        f"ratio: to the longer of the two alone, {LONGER_SECONDS:g} s; one after the other they "
        f"would take {SUM_SECONDS:g} s, a ratio of {SUM_SECONDS / LONGER_SECONDS:g}"
    )


def feeding_targets(measured: Feeding) -> list[Target]:
    """Return the targets, each next to its worst cell."""
    fed = [cell.ratio_of("distributed dataset") for cell in measured.fed]
    iterated = [cell.ratio_of("tensorflow_input") for cell in measured.iterated]
    return [
        Target.at_most("step fed by a dataset / on a constant batch", AT_MOST_FED, max(fed)),
        Target.at_least(
            "batches a second, replicax / tf.distribute", AT_LEAST_ITERATING, min(iterated)
        ),
        Target.at_most(
            "epoch of a slow source / the longer of source and step",
            AT_MOST_SLOW,
            max(median(epochs.ratios) for epochs in measured.slow),
        ),
    ]


@click.command()
@rounds_option
@sittings_option
@peer_environments_option
def main(rounds: int, sittings: int, peer_environments: Path) -> None:
    """Time distributed input."""
    header = describe_machine()
    measured = measure_feeding(sittings, rounds, peer_environments)
    console = Console(width=WIDTH)
    console.print(header, highlight=False)
    versions = {"fed_step": measured.fed[0].baseline.versions, **versions_of(measured.iterated)}
    print_versions(console, versions)
    print_feeding(console, measured)
    print_targets(console, feeding_targets(measured))


if __name__ == "__main__":
    main()
