"""The host time that replicax adds to a compiled step, against the number of variables.

`python benchmarks/overhead.py` prints this table alone; run.py prints it among the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import click
from contestants._tiny_program import Program
from report import describe_machine, microseconds, print_versions, spread, table_of
from rich.console import Console
from targets import Target
from tiny_steps import TinyStep, TinyTimes, measure_tiny_step

REPLICAS = 2
CALLS_OF_A_ROUND = {10: 200, 100: 100, 1000: 15}
AT_MOST_MICROSECONDS = 100  # with the smallest number of variables
AT_MOST_MICROSECONDS_A_VARIABLE = 1


def measure_overhead(rounds: int) -> list[TinyTimes]:
    return [
        measure_tiny_step(TinyStep(Program(variables), REPLICAS, rounds, calls, compiles=1))
        for variables, calls in CALLS_OF_A_ROUND.items()
    ]


def microseconds_a_variable(measured: Sequence[TinyTimes]) -> float:
    """Return the slope between the fewest and the most variables."""
    few, many = measured[0], measured[-1]
    more = many.asked.program.variables - few.asked.program.variables
    return 1e6 * (many.overhead - few.overhead) / more


def print_overhead(console: Console, measured: Sequence[TinyTimes]) -> None:
    table = table_of(
        f"Host overhead of a compiled step, {REPLICAS} replicas, "
        f"{len(measured[0].overheads)} interleaved rounds",
        "variables",
        "replicax,\nus/step",
        "jax.jit,\nus/step",
        "overhead,\nus",
        "middle half\nof the rounds",
        "us a\nvariable",
    )
    for times in measured:
        table.add_row(
            f"{times.asked.program.variables:,}",
            microseconds(median(times.later_calls["replicax"])),
            microseconds(median(times.later_calls["jax"])),
            microseconds(times.overhead),
            spread(times.overheads, microseconds),
            f"{1e6 * times.overhead / times.asked.program.variables:.2f}",
        )
    console.print(table)
    console.print(
        f"from {measured[0].asked.program.variables} to {measured[-1].asked.program.variables:,} "
        f"variables, each variable more adds {microseconds_a_variable(measured):.2f} us"
    )


def overhead_targets(measured: Sequence[TinyTimes]) -> list[Target]:
    few = measured[0]
    return [
        Target.at_most(
            f"us that replicax adds to a step with {few.asked.program.variables} variables",
            AT_MOST_MICROSECONDS,
            1e6 * few.overhead,
        ),
        Target.at_most(
            "us more for each variable more",
            AT_MOST_MICROSECONDS_A_VARIABLE,
            microseconds_a_variable(measured),
        ),
    ]


@click.command()
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(min=2))
def main(rounds: int) -> None:
    """Time a compiled step that does next to nothing."""
    console = Console()
    console.print(describe_machine(), highlight=False)
    measured = measure_overhead(rounds)
    print_versions(console, {"replicax": measured[0].versions})
    print_overhead(console, measured)


if __name__ == "__main__":
    main()
