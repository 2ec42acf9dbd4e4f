"""A training step of `fit` of a Keras model, made in the scope of a strategy.

`python benchmarks/keras_fit.py` prints this table alone; run.py prints it among the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
from contestants._problem import EPOCH_ROWS, Cell
from many_steps import MANY_STEPS_CELLS
from options import (
    QUICK_ROUNDS,
    peer_environments_option,
    quick_option,
    rounds_option,
    sittings_option,
)
from report import (
    WIDTH,
    MeasuredCell,
    describe_machine,
    print_targets,
    print_training,
    print_versions,
    versions_of,
)
from rich.console import Console
from targets import Target
from training import TENSORFLOW, Contestant, measure_cell

# The others' times are divided by that of the first.
FITTING = (
    Contestant("replicax_fit"),
    Contestant("data_parallel_fit"),
    Contestant("tensorflow_fit", TENSORFLOW),
)
# There are even more steps: with 0.03, rounding errors are too large after eight rounds.
LEARNING_RATE = 0.02
FIT_CELLS = tuple(replace(cell, learning_rate=LEARNING_RATE) for cell in MANY_STEPS_CELLS)
EPOCHS = 1  # per turn
AT_LEAST = {"data_parallel_fit": 1.0, "tensorflow_fit": 1.5}
NAMES = {"data_parallel_fit": "keras.distribution.DataParallel", "tensorflow_fit": "tf.distribute"}


def measure_fit(
    sittings: int, rounds: int, peer_environments: Path, cells: Sequence[Cell] = FIT_CELLS
) -> list[MeasuredCell]:
    """Measure a training step: to the protocol, a whole epoch is one step."""
    return [
        measure_cell(FITTING, cell, sittings, rounds, EPOCHS, peer_environments).each_of(
            EPOCH_ROWS // cell.global_batch
        )
        for cell in cells
    ]


def print_fit(console: Console, measured: Sequence[MeasuredCell]) -> None:
    print_training(console, "Training step of a Keras model's fit", measured)


def fit_targets(measured: Sequence[MeasuredCell]) -> list[Target]:
    """Return the targets, each next to its worst cell."""
    return [
        Target.at_least(
            f"fit, {NAMES[peer]} / replicax", bound, min(one.ratio_of(peer) for one in measured)
        )
        for peer, bound in AT_LEAST.items()
        if measured
    ]


@click.command()
@rounds_option
@sittings_option
@quick_option
@peer_environments_option
def main(rounds: int, sittings: int, quick: bool, peer_environments: Path) -> None:
    """Time `fit` of a Keras model."""
    if quick:
        rounds, sittings = QUICK_ROUNDS, 1
    header = describe_machine()
    cells = FIT_CELLS[:1] if quick else FIT_CELLS
    measured = measure_fit(sittings, rounds, peer_environments, cells)
    console = Console(width=WIDTH)
    console.print(header, highlight=False)
    print_versions(console, versions_of(measured))
    print_fit(console, measured)
    if not quick:  # two rounds are no evidence
        print_targets(console, fit_targets(measured))


if __name__ == "__main__":
    main()
