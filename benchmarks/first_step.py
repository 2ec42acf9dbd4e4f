"""The first step of a training with many variables, against the same by hand in JAX.

`python benchmarks/first_step.py` prints this table alone; run.py prints it among the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

import click
from options import QUICK_ROUNDS
from processes import ask
from report import WIDTH, announce, describe_machine, print_targets, print_versions, table_of
from rich.console import Console
from targets import Target

VARIABLES = (10, 50, 200, 500, 1000)
OPTIMIZERS = ("sgd", "adam")
WORKERS = (1, 2)
FORMS = ("replicax", "jax")
ROUNDS = 3
QUICK_VARIABLES = VARIABLES[:1]
LIMIT_SECONDS = 900  # 1,000 variables take minutes on a machine that has other things to do
TOLERANCE = 1e-3  # relative, for losses
AT_MOST = 1.3


@dataclass(frozen=True)
class FirstSteps:
    """The answers of new processes that took turns, one per round and form."""

    variables: int
    optimizer: str
    workers: int
    replicax: Sequence[Mapping[str, Any]]
    jax: Sequence[Mapping[str, Any]]

    def ratio(self, what: str) -> float:
        """Return the median of what replicax takes divided by what JAX takes in the same round."""
        return median(
            mine[what] / theirs[what] for mine, theirs in zip(self.replicax, self.jax, strict=True)
        )


def measure_first_steps(
    rounds: int = ROUNDS,
    variables: Sequence[int] = VARIABLES,
    optimizers: Sequence[str] = OPTIMIZERS,
    workers: Sequence[int] = WORKERS,
) -> list[FirstSteps]:
    return [_measure(rounds, *asked) for asked in product(workers, optimizers, variables)]


def _measure(rounds: int, workers: int, optimizer: str, variables: int) -> FirstSteps:
    announce(f"the first step, {variables} variables, {optimizer}, processes: {workers}")
    question = {"variables": variables, "optimizer": optimizer, "workers": workers}
    answers: dict[str, list[Mapping[str, Any]]] = {form: [] for form in FORMS}
    for number in range(rounds):
        for form in FORMS if number % 2 == 0 else reversed(FORMS):
            asked = {"form": form, **question}
            answers[form].append(ask("first_step.py", asked, limit_seconds=LIMIT_SECONDS))
    for mine, theirs in zip(answers["replicax"], answers["jax"], strict=True):
        losses = [*zip(mine["losses"], theirs["losses"], strict=True)]
        if any(abs(a - b) > TOLERANCE * abs(b) for a, b in losses):
            raise click.ClickException(
                f"The losses of {question} differ: {losses}. These are two trainings, whose times "
                "cannot be compared."
            )
    return FirstSteps(variables, optimizer, workers, answers["replicax"], answers["jax"])


def print_first_steps(console: Console, measured: Sequence[FirstSteps]) -> None:
    table = table_of(
        f"The first step, 2 replicas, new processes, {len(measured[0].replicax)} rounds",
        "processes",
        "optimizer",
        "variables",
        "replicax,\ns",
        "by hand,\ns",
        "\nratio",
        "replicax,\ns of CPU",
        "by hand,\ns of CPU",
        "\nratio",
        words=("optimizer",),
    )
    for each in measured:
        columns = []
        for what in ("seconds", "cpu_seconds"):
            for answers in (each.replicax, each.jax):
                columns.append(f"{median(answer[what] for answer in answers):.2f}")
            columns.append(f"{each.ratio(what):.2f}")
        table.add_row(str(each.workers), each.optimizer, f"{each.variables:,}", *columns)
    console.print(table)
    console.print(
        "by hand: the same Optax update in one jax.jit of a jax.shard_map; ratio: replicax divided "
        "by that, the median over the rounds; CPU: of one process"
    )


def first_step_targets(measured: Sequence[FirstSteps]) -> list[Target]:
    most = max(measured, key=lambda each: each.ratio("seconds"))
    return [
        Target.at_most(
            f"replicax / hand-written JAX, first step, the most: {most.variables:,} variables, "
            f"{most.optimizer}, processes: {most.workers}",
            AT_MOST,
            most.ratio("seconds"),
        )
    ]


@click.command()
@click.option("--rounds", default=ROUNDS, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--variables", multiple=True, type=int, help="Only so many variables; may be repeated."
)
@click.option(
    "--optimizer", "optimizers", multiple=True, type=click.Choice(OPTIMIZERS), help="Only this."
)
@click.option(
    "--workers",
    multiple=True,
    type=click.IntRange(min(WORKERS), max(WORKERS)),
    help="Only so many.",
)
@click.option(
    "--quick",
    is_flag=True,
    help=f"To see that it works: {QUICK_VARIABLES[0]} variables, {QUICK_ROUNDS} rounds.",
)
def main(
    rounds: int,
    variables: Sequence[int],
    optimizers: Sequence[str],
    workers: Sequence[int],
    quick: bool,
) -> None:
    """Time the first step of a training, in processes that are new each time."""
    console = Console(width=WIDTH)
    console.print(describe_machine(), highlight=False)
    if quick:
        rounds, variables = QUICK_ROUNDS, QUICK_VARIABLES
    measured = measure_first_steps(
        rounds, variables or VARIABLES, optimizers or OPTIMIZERS, workers or WORKERS
    )
    print_versions(console, {"both": measured[0].replicax[0]["versions"]})
    print_first_steps(console, measured)
    if not quick:
        print_targets(console, first_step_targets(measured))


if __name__ == "__main__":
    main()
