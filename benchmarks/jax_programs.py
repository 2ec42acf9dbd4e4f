"""Programs of JAX users under a strategy, against their own mesh form.

`python benchmarks/jax_programs.py` measures all kinds; given names, only those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import click
from options import QUICK_ROUNDS
from processes import ask
from report import (
    WIDTH,
    announce,
    describe_machine,
    milliseconds,
    print_targets,
    print_versions,
    spread,
    table_of,
)
from rich.console import Console
from targets import Target

KINDS = (
    "dict_and_sgd",
    "dict_and_adam",
    "variables_and_optimizer",
    "clipped_and_scheduled",
    "multi_steps",
    "averaged_params",
    "equinox_module",
    "linen_train_state",
    "nnx_module",
    "bfloat16",
    "scan_over_layers",
    "scan_over_microbatches",
)
FORMS = ("replicax", "mesh")
STEPS_OF_A_ROUND = 10
COMPILES = 3
AT_LEAST_PER_STEP = 1.0
AT_MOST_FIRST_STEP = 1.3


@dataclass(frozen=True)
class ProgramTimes:
    """The seconds of the median step of each round, and of steps that compile.

    These are the first step of a new process, and the first of a function in a process that has
    traced and compiled much the same before.
    """

    kind: str
    replicax: Sequence[float]
    mesh: Sequence[float]
    replicax_first: Sequence[float]
    mesh_first: Sequence[float]
    replicax_again: Sequence[float]
    mesh_again: Sequence[float]
    versions: Mapping[str, str]

    @property
    def ratios(self) -> list[float]:
        """The mesh form's time divided by that of replicax, round by round."""
        return [theirs / mine for mine, theirs in zip(self.replicax, self.mesh, strict=True)]

    @property
    def first_ratio(self) -> float:
        """The first step of replicax divided by that of the mesh form."""
        return median(self.replicax_first) / median(self.mesh_first)

    @property
    def again_ratio(self) -> float:
        """The same ratio, for steps that compile in a process that has done so before."""
        return median(self.replicax_again) / median(self.mesh_again)


def measure_program(kind: str, rounds: int) -> ProgramTimes:
    announce(f"{kind}, by replicax and by its mesh form")
    question = {"kind": kind, "rounds": rounds, "steps": STEPS_OF_A_ROUND, "compiles": COMPILES}
    answer = ask("jax_program.py", question)
    first = [
        [ask("jax_program.py", {"kind": kind, "first": form})["first"] for form in FORMS]
        for _ in range(COMPILES)
    ]
    return ProgramTimes(
        kind=kind,
        replicax=answer["later"]["replicax"],
        mesh=answer["later"]["mesh"],
        replicax_first=[mine for mine, _ in first],
        mesh_first=[theirs for _, theirs in first],
        replicax_again=answer["compiling"]["replicax"],
        mesh_again=answer["compiling"]["mesh"],
        versions=answer["versions"],
    )


def print_programs(console: Console, measured: Sequence[ProgramTimes]) -> None:
    table = table_of(
        f"Programs of JAX users, 2 devices, {len(measured[0].replicax)} interleaved rounds",
        "program",
        "replicax,\nms",
        "mesh,\nms",
        "ratio",
        "middle half\nof rounds",
        "first step,\nreplicax",
        "\nmesh",
        "\nratio",
        "compiled\nagain, ratio",
        words=("program",),
    )
    for times in measured:
        table.add_row(
            times.kind,
            milliseconds(median(times.replicax)),
            milliseconds(median(times.mesh)),
            f"{median(times.ratios):.2f}",
            spread(times.ratios, "{:.2f}".format),
            milliseconds(median(times.replicax_first)),
            milliseconds(median(times.mesh_first)),
            f"{times.first_ratio:.2f}",
            f"{times.again_ratio:.2f}",
        )
    console.print(table)
    console.print(
        "ratio per step: the mesh form's time divided by that of replicax; above 1 replicax is "
        "faster; of steps that compile, first in a new process and then again in one that has "
        "compiled the like: replicax divided by the mesh form"
    )


def program_targets(measured: Sequence[ProgramTimes]) -> list[Target]:
    slowest = min(measured, key=lambda times: median(times.ratios))
    latest = max(measured, key=lambda times: times.first_ratio)
    return [
        Target.at_least(
            f"mesh form / replicax per step, the least: {slowest.kind}",
            AT_LEAST_PER_STEP,
            median(slowest.ratios),
        ),
        Target.at_most(
            f"replicax / mesh form, first step, the most: {latest.kind}",
            AT_MOST_FIRST_STEP,
            latest.first_ratio,
        ),
    ]


@click.command()
@click.argument("kinds", nargs=-1, type=click.Choice(KINDS))
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(min=2))
@click.option("--quick", is_flag=True, help=f"To see that it works: {QUICK_ROUNDS} rounds.")
def main(kinds: Sequence[str], rounds: int, quick: bool) -> None:
    """Time training steps that users of JAX write, by replicax and by `jax.jit` with shardings."""
    console = Console(width=WIDTH)
    console.print(describe_machine(), highlight=False)
    measured = [measure_program(kind, QUICK_ROUNDS if quick else rounds) for kind in kinds or KINDS]
    print_versions(console, {"both": measured[0].versions})
    print_programs(console, measured)
    print_targets(console, program_targets(measured))


if __name__ == "__main__":
    main()
