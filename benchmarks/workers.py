"""One training step of several workers, which are processes of one device each.

`python benchmarks/workers.py` prints this table alone; run.py prints it among the others. With
`--parts` it prints the parts of the steps of replicax and of DDP instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click
from contestants._problem import Cell
from options import peer_environments_option, rounds_option, sittings_option
from report import (
    WIDTH,
    MeasuredCell,
    describe_machine,
    milliseconds,
    print_targets,
    print_training,
    print_versions,
    spread,
    table_of,
    versions_of,
)
from rich.console import Console
from targets import Target
from training import TENSORFLOW, TORCH, Contestant, measure_cell

WORKERS = 2
# The others' times are divided by that of the first.
TOGETHER = (
    Contestant("replicax_workers"),
    Contestant("jax_workers"),
    Contestant("tensorflow_workers", TENSORFLOW),
    Contestant("torch_ddp", TORCH),
)
PARTS = (
    Contestant("replicax_parts step"),
    Contestant("replicax_parts compute"),
    Contestant("replicax_parts all-reduce"),
    Contestant("replicax_parts call"),
    Contestant("torch_parts step", TORCH),
    Contestant("torch_parts compute", TORCH),
    Contestant("torch_parts all-reduce", TORCH),
)
WORKERS_CELLS = tuple(
    Cell(hidden=hidden, global_batch=batch, replicas=WORKERS)
    for hidden, batch in ((32, 64), (512, 256), (2048, 256))
)
STEPS = {32: 50, 512: 10, 2048: 4}
AT_LEAST = {
    "tensorflow_workers": {32: 2.5, 512: 1.3, 2048: 1.0},
    "jax_workers": {32: 3, 512: 1.2, 2048: 1.0},
    "torch_ddp": {32: 1.0},
}
NAMES = {
    "tensorflow_workers": "tf.distribute",
    "jax_workers": "hand-written JAX",
    "torch_ddp": "PyTorch DDP",
}


def measure_workers(
    sittings: int,
    rounds: int,
    peer_environments: Path,
    cells: Sequence[Cell] = WORKERS_CELLS,
    contestants: Sequence[Contestant] = TOGETHER,
) -> list[MeasuredCell]:
    return [
        measure_cell(contestants, cell, sittings, rounds, STEPS[cell.hidden], peer_environments)
        for cell in cells
    ]


def print_workers(console: Console, measured: Sequence[MeasuredCell]) -> None:
    print_training(console, f"Compiled training step, {WORKERS} workers", measured)


def print_parts(console: Console, measured: Sequence[MeasuredCell]) -> None:
    table = table_of(
        f"Parts of a training step, {WORKERS} workers, "
        f"{len(measured[0].baseline.seconds_per_step)} interleaved rounds",
        "hidden,\nbatch",
        "part",
        "ms,\nmedian",
        "middle half\nof the rounds",
        words=("part",),
    )
    for one in measured:
        label = f"{one.cell.hidden}, {one.cell.global_batch}"
        for measurement in one.measurements:
            table.add_row(
                label,
                measurement.contestant.replace("_parts", ","),
                milliseconds(median(measurement.seconds_per_step)),
                spread(measurement.seconds_per_step, milliseconds),
            )
            label = ""
        table.add_section()
    console.print(table)


def workers_targets(measured: Sequence[MeasuredCell]) -> list[Target]:
    return [
        Target.at_least(
            f"{WORKERS} workers, {NAMES[peer]} / replicax, hidden {one.cell.hidden}",
            bounds[one.cell.hidden],
            one.ratio_of(peer),
        )
        for peer, bounds in AT_LEAST.items()
        for one in measured
        if one.cell.hidden in bounds
    ]


@click.command()
@rounds_option
@sittings_option
@click.option("--parts", is_flag=True, help="Times the parts of a step, of replicax and of DDP.")
@click.option(
    "--hidden",
    "hiddens",
    multiple=True,
    type=click.Choice([str(cell.hidden) for cell in WORKERS_CELLS]),
    help="Only networks of this size; may be repeated.",
)
@peer_environments_option
def main(
    rounds: int, sittings: int, parts: bool, hiddens: tuple[str, ...], peer_environments: Path
) -> None:
    """Time a training step of several workers."""
    header = describe_machine()
    cells = [cell for cell in WORKERS_CELLS if not hiddens or str(cell.hidden) in hiddens]
    contestants = PARTS if parts else TOGETHER
    measured = measure_workers(sittings, rounds, peer_environments, cells, contestants)
    console = Console(width=WIDTH)
    console.print(header, highlight=False)
    print_versions(console, versions_of(measured))
    if parts:
        print_parts(console, measured)
        return
    print_workers(console, measured)
    print_targets(console, workers_targets(measured))


if __name__ == "__main__":
    main()
