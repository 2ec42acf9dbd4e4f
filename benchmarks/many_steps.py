"""Several training steps per call, on a distributed dataset.

`python benchmarks/many_steps.py` prints this table alone; run.py prints it among the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
from contestants._problem import STEPS_A_CALL, Cell
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
from training import COMPILED_CELLS, TENSORFLOW, Contestant, measure_cell

# The others' times are divided by that of the first.
BY_ONE_CALL = (
    Contestant("replicax_many_steps"),
    Contestant("replicax_loop"),
    Contestant("jax_many_steps"),
    Contestant("tensorflow_many_steps", TENSORFLOW),
)
CALLS = {32: 5, 512: 1}  # per turn
REPLICAS = 2
# With 0.1, rounding errors would exceed the tolerance within so many steps.
LEARNING_RATE = 0.03
MANY_STEPS_CELLS = tuple(
    replace(cell, learning_rate=LEARNING_RATE)
    for cell in COMPILED_CELLS
    if cell.hidden in CALLS and cell.replicas == REPLICAS
)
AT_LEAST = 1.0
NAMES = {
    "replicax_loop": "a call for each step",
    "jax_many_steps": "hand-written JAX",
    "tensorflow_many_steps": "tf.distribute",
}


def measure_many_steps(
    sittings: int, rounds: int, peer_environments: Path, cells: Sequence[Cell] = MANY_STEPS_CELLS
) -> list[MeasuredCell]:
    """Measure a training step: to the protocol, a whole call is one step."""
    return [
        measure_cell(
            BY_ONE_CALL, cell, sittings, rounds, CALLS[cell.hidden], peer_environments
        ).each_of(STEPS_A_CALL)
        for cell in cells
    ]


def print_many_steps(console: Console, measured: Sequence[MeasuredCell]) -> None:
    print_training(console, f"Compiled training step, {STEPS_A_CALL} by one call", measured)


def many_steps_targets(measured: Sequence[MeasuredCell]) -> list[Target]:
    """Return the targets, each next to its worst cell."""
    return [
        Target.at_least(
            f"{STEPS_A_CALL} steps, {name} / replicax by one call",
            AT_LEAST,
            min(one.ratio_of(peer) for one in measured),
        )
        for peer, name in NAMES.items()
    ]


@click.command()
@rounds_option
@sittings_option
@quick_option
@peer_environments_option
def main(rounds: int, sittings: int, quick: bool, peer_environments: Path) -> None:
    """Time several training steps per call."""
    if quick:
        rounds, sittings = QUICK_ROUNDS, 1
    header = describe_machine()
    cells = MANY_STEPS_CELLS[:1] if quick else MANY_STEPS_CELLS
    measured = measure_many_steps(sittings, rounds, peer_environments, cells)
    console = Console(width=WIDTH)
    console.print(header, highlight=False)
    print_versions(console, versions_of(measured))
    print_many_steps(console, measured)
    if not quick:  # two rounds are no evidence
        print_targets(console, many_steps_targets(measured))


if __name__ == "__main__":
    main()
