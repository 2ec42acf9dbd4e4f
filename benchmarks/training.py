"""One training step of replicax and of its peers, side by side."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from contestants._problem import AnyCell, Cell
from environments import PeerEnvironment
from processes import CONTESTANTS, ContestantProcess
from report import MeasuredCell, Measurement, announce
from targets import Target

RESULT_TOLERANCE = 1e-3

TENSORFLOW = PeerEnvironment("tensorflow", "tensorflow-cpu==2.21.*")
TORCH = PeerEnvironment("torch", "torch==2.13.0 numpy")


@dataclass(frozen=True)
class Contestant:
    """A script of `contestants/`, by its name and its arguments, and its environment."""

    name: str
    environment: PeerEnvironment | None = None  # None: the one that replicax is installed in

    def start(self, python: Path) -> ContestantProcess:
        script, *arguments = self.name.split()
        return ContestantProcess(self.name, python, CONTESTANTS / f"{script}.py", *arguments)

    def python(self, peer_environments: Path) -> Path:
        if self.environment is None:
            return Path(sys.executable)
        return self.environment.python(peer_environments)


# The others' times are divided by that of the first of each.
EAGER = (
    Contestant("replicax_eager"),
    Contestant("tensorflow_eager", TENSORFLOW),
)
COMPILED = (
    Contestant("replicax_compiled"),
    Contestant("jax_shard_map"),
    Contestant("tensorflow_function", TENSORFLOW),
    Contestant("torch_ddp", TORCH),
)
EAGER_CELLS = (Cell(hidden=32, global_batch=64, replicas=2),)
COMPILED_CELLS = tuple(
    Cell(hidden=hidden, global_batch=batch, replicas=replicas)
    for hidden, batch in ((32, 64), (512, 256), (2048, 256))
    for replicas in (2, 4)
)
# A turn is long enough to be timed, and short enough that all have theirs under equal load.
EAGER_STEPS = 20
COMPILED_STEPS = {32: 50, 512: 8, 2048: 3}


def measure_eager(sittings: int, rounds: int, peer_environments: Path) -> list[MeasuredCell]:
    return [
        measure_cell(EAGER, cell, sittings, rounds, EAGER_STEPS, peer_environments)
        for cell in EAGER_CELLS
    ]


def measure_compiled(
    sittings: int, rounds: int, peer_environments: Path, cells: Sequence[Cell] = COMPILED_CELLS
) -> list[MeasuredCell]:
    return [
        measure_cell(
            COMPILED, cell, sittings, rounds, COMPILED_STEPS[cell.hidden], peer_environments
        )
        for cell in cells
    ]


def measure_cell(
    contestants: Sequence[Contestant],
    cell: AnyCell,
    sittings: int,
    rounds: int,
    steps: int,
    peer_environments: Path,
    tolerance: float = RESULT_TOLERANCE,
) -> MeasuredCell:
    """Measure all rounds of all sittings.

    Each sitting has new processes: the threads and memory that a process happens to get stay with
    it, and more rounds of the same processes cannot average that out.
    """
    announce(f"{contestants[0].name} and peers, {cell}")
    measured = [
        _sitting(contestants, cell, rounds, steps, peer_environments, tolerance)
        for _ in range(sittings)
    ]
    return MeasuredCell.of_sittings(cell, steps, measured)


def _sitting(
    contestants: Sequence[Contestant],
    cell: AnyCell,
    rounds: int,
    steps: int,
    peer_environments: Path,
    tolerance: float,
) -> list[Measurement]:
    """Run the contestants in turns, so that what slows the machine slows all of them."""
    pythons = [contestant.python(peer_environments) for contestant in contestants]
    answers = []
    with ExitStack() as stack:
        processes, ready = [], []
        for contestant, python in zip(contestants, pythons, strict=True):
            # They start one after the other, or they would slow each other's first step.
            processes.append(stack.enter_context(contestant.start(python)))
            ready.append(processes[-1].build(cell))
        steps_done = ready[0]["steps_done"]
        for number in range(rounds):
            answers.append(_turns(processes, steps, first=number % len(processes)))
            steps_done += steps
            results = [answer["result"] for answer in answers[-1]]
            _check_results(contestants, cell, steps_done, results, tolerance)
    return [
        Measurement(
            contestant=contestant.name,
            versions=ready[index]["versions"],
            seconds_per_step=[answer[index]["seconds_per_step"] for answer in answers],
            first_step_seconds=[ready[index]["first_step_seconds"]],
            last_result=answers[-1][index]["result"],
        )
        for index, contestant in enumerate(contestants)
    ]


def _turns(processes: Sequence[ContestantProcess], steps: int, first: int) -> list[Any]:
    """Run each alone, once, beginning with `first`; return the answers in the usual order."""
    order = [*range(first, len(processes)), *range(first)]
    answers = {index: processes[index].run_steps(steps) for index in order}
    return [answers[index] for index in range(len(processes))]


def _check_results(
    contestants: Sequence[Contestant],
    cell: AnyCell,
    steps_done: int,
    results: Sequence[float],
    tolerance: float,
) -> None:
    """Refuse to compare the times of contestants that do not do the same."""
    first, expected = contestants[0], results[0]
    for contestant, result in zip(contestants, results, strict=True):
        # This is written so that a loss of NaN fails as well.
        if not math.isclose(result, expected, rel_tol=tolerance):
            raise click.ClickException(
                f"After {steps_done} steps of the {cell}, the result of {first.name} is "
                f"{expected:.7g} and that of {contestant.name} is {result:.7g}. More than "
                f"{tolerance:g} of difference: they do not do the same, and their times "
                "cannot be compared. Mend the one that is wrong."
            )


def training_targets(cells: Sequence[MeasuredCell]) -> list[Target]:
    """Return the targets of the cells that were measured, each next to its worst cell."""

    def worst(contestant: str, hidden: int | None) -> float | None:
        ratios = [
            measured.ratio_of(contestant)
            for measured in cells
            if hidden is None or measured.cell.hidden == hidden
        ]
        return min(ratios, default=None)

    wanted = (
        ("hand-written JAX / replicax, every cell", "jax_shard_map", None, 0.95),
        ("hand-written JAX / replicax, hidden 32", "jax_shard_map", 32, 1.2),
        ("tf.distribute / replicax, hidden 32", "tensorflow_function", 32, 2),
        ("tf.distribute / replicax, hidden 512", "tensorflow_function", 512, 1.3),
    )
    return [
        Target.at_least(what, bound, measured)
        for what, contestant, hidden, bound in wanted
        if (measured := worst(contestant, hidden)) is not None
    ]
