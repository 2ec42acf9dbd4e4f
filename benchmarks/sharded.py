"""A training step whose state is divided over the replicas, against mirrored state and FSDP2.

`python benchmarks/sharded.py` measures it and prints the table; it is no part of run.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from contestants._problem import Cell
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
from training import COMPILED_STEPS, TORCH, Contestant, measure_cell

# The others' times are divided by that of the first.
SHARDED = (
    Contestant("replicax_sharded"),
    Contestant("replicax_compiled"),
    Contestant("torch_fsdp", TORCH),
)
SHARDED_CELLS = tuple(
    Cell(hidden=hidden, global_batch=256, replicas=replicas)
    for hidden in (512, 2048)
    for replicas in (2, 4)
)
# A step with divided state may take 1.15 times as long as one with mirrored state.
AT_LEAST = {"replicax_compiled": 1 / 1.15, "torch_fsdp": 1.0}
NAMES = {"replicax_compiled": "mirrored state", "torch_fsdp": "PyTorch's fully_shard"}


def sharded_targets(measured: Sequence[MeasuredCell]) -> list[Target]:
    """Return the targets, each next to its worst cell."""
    return [
        Target.at_least(
            f"{NAMES[peer]} / replicax, divided",
            bound,
            min(one.ratio_of(peer) for one in measured),
        )
        for peer, bound in AT_LEAST.items()
    ]


@click.command()
@rounds_option
@sittings_option
@quick_option
@peer_environments_option
def main(rounds: int, sittings: int, quick: bool, peer_environments: Path) -> None:
    """Time training steps with divided state."""
    if quick:
        rounds, sittings = QUICK_ROUNDS, 1
    header = describe_machine()
    measured = [
        measure_cell(
            SHARDED, cell, sittings, rounds, COMPILED_STEPS[cell.hidden], peer_environments
        )
        for cell in (SHARDED_CELLS[:1] if quick else SHARDED_CELLS)
    ]
    console = Console(width=WIDTH)
    console.print(header, highlight=False)
    print_versions(console, versions_of(measured))
    print_training(console, "Training step, divided state", measured)
    if not quick:  # two rounds are no evidence
        print_targets(console, sharded_targets(measured))


if __name__ == "__main__":
    main()
