"""What replicax adds to a compiled step, and to compiling it, against the number of replicas.

`python benchmarks/scaling.py` prints this table alone; run.py prints it among the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import click
from report import microseconds, print_header, print_versions, table_of
from rich.console import Console
from tiny_steps import TinyStep, TinyTimes, measure_tiny_step

REPLICAS = (2, 4, 8, 16, 32, 64)
VARIABLES = 10
CALLS_OF_A_ROUND = 60
COMPILES = 5


def measure_scaling(rounds: int, replicas: Sequence[int] = REPLICAS) -> list[TinyTimes]:
    return [
        measure_tiny_step(TinyStep(count, VARIABLES, rounds, CALLS_OF_A_ROUND, COMPILES))
        for count in replicas
    ]


def print_scaling(console: Console, measured: Sequence[TinyTimes]) -> None:
    table = table_of(
        f"Virtual CPU devices, {VARIABLES} variables, {len(measured[0].replicax)} interleaved "
        f"rounds, {COMPILES} compilations",
        "replicas",
        "replicax,\nus a step",
        "jit(shard_map),\nus a step",
        "overhead,\nus",
        "of a round:\nlow, high",
        "replicax,\nms to compile",
        "jit(shard_map),\nms to compile",
    )
    for times in measured:
        table.add_row(
            str(times.asked.replicas),
            microseconds(times.replicax),
            microseconds(times.jax),
            f"{1e6 * times.overhead:.0f}",
            f"{1e6 * min(times.overheads):.0f}, {1e6 * max(times.overheads):.0f}",
            f"{1e3 * median(times.replicax_first):.0f}",
            f"{1e3 * median(times.jax_first):.0f}",
        )
    console.print(table)


@click.command()
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(min=1))
def main(rounds: int) -> None:
    """Times a compiled step that does next to nothing, on more and more virtual devices."""
    console = Console()
    print_header(console)
    measured = measure_scaling(rounds)
    print_versions(console, {"replicax": measured[0].versions})
    print_scaling(console, measured)


if __name__ == "__main__":
    main()
