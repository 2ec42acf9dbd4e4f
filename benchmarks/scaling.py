"""The time that replicax adds to a compiled step and its compilation, by number of replicas.

`python benchmarks/scaling.py` prints this table alone; run.py prints it among the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import click
from contestants._tiny_program import Program
from report import describe_machine, microseconds, print_versions, spread, table_of
from rich.console import Console
from tiny_steps import TinyStep, TinyTimes, measure_tiny_step

REPLICAS = (2, 4, 8, 16, 32, 64)
VARIABLES = 10
CALLS_OF_A_ROUND = 60
COMPILES = 5


def measure_scaling(rounds: int, replicas: Sequence[int] = REPLICAS) -> list[TinyTimes]:
    return [
        measure_tiny_step(TinyStep(Program(VARIABLES), count, rounds, CALLS_OF_A_ROUND, COMPILES))
        for count in replicas
    ]


def print_scaling(console: Console, measured: Sequence[TinyTimes]) -> None:
    table = table_of(
        f"Virtual CPU devices, {VARIABLES} variables, {len(measured[0].overheads)} interleaved "
        f"rounds, {COMPILES} compilations",
        "replicas",
        "replicax,\nus/step",
        "by hand,\nus/step",
        "overhead,\nus",
        "middle half\nof the rounds",
        "replicax,\nms to compile",
        "by hand,\nms to compile",
    )
    for times in measured:
        table.add_row(
            str(times.asked.replicas),
            microseconds(median(times.later_calls["replicax"])),
            microseconds(median(times.later_calls["jax"])),
            microseconds(times.overhead),
            spread(times.overheads, microseconds),
            f"{1e3 * median(times.first_calls['replicax']):.0f}",
            f"{1e3 * median(times.first_calls['jax']):.0f}",
        )
    console.print(table)
    console.print(
        "by hand: jax.jit and jax.shard_map; to compile: the first call, until it is done"
    )


@click.command()
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(min=2))
def main(rounds: int) -> None:
    """Time a compiled step that does next to nothing, on more and more virtual devices."""
    console = Console()
    console.print(describe_machine(), highlight=False)
    measured = measure_scaling(rounds)
    print_versions(console, {"replicax": measured[0].versions})
    print_scaling(console, measured)


if __name__ == "__main__":
    main()
