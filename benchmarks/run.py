"""Times one training step of replicax and of its peers, side by side: `make bench`.

README.md says what is measured and how to read it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click
from contestants._problem import Cell
from environments import PeerEnvironment
from processes import ContestantProcess
from report import Measurement, print_cell, print_header
from rich.console import Console

HERE = Path(__file__).parent
LOSS_TOLERANCE = 1e-3

TENSORFLOW = PeerEnvironment("tensorflow", "tensorflow-cpu==2.21.*")


@dataclass(frozen=True)
class Contestant:
    """A script of `contestants/`, by its name, and where it runs."""

    name: str
    baseline: str  # the contestant whose time this one's is divided by
    environment: PeerEnvironment | None = None  # None: the one that replicax is installed in

    @property
    def script(self) -> Path:
        return HERE / "contestants" / f"{self.name}.py"

    def python(self, peer_environments: Path) -> Path:
        if self.environment is None:
            return Path(sys.executable)
        return self.environment.python(peer_environments)


CONTESTANTS = (
    Contestant("replicax_eager", baseline="replicax_eager"),
    Contestant("tensorflow_eager", baseline="replicax_eager", environment=TENSORFLOW),
)
CELLS = (Cell(hidden=32, global_batch=64, replicas=2),)


@click.command()
@click.option(
    "--rounds", default=7, show_default=True, type=click.IntRange(min=5), help="Turns of each."
)
@click.option(
    "--steps", default=20, show_default=True, type=click.IntRange(min=1), help="Steps of a turn."
)
@click.option(
    "--peer-environments",
    default=HERE.parent / ".bench",
    show_default=".bench in the repository",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the virtual environments of the peers are, or are made when missing.",
)
def main(rounds: int, steps: int, peer_environments: Path) -> None:
    """Times one training step of replicax and of its peers, side by side."""
    console = Console()
    print_header(console)
    for cell in CELLS:
        print_cell(console, cell, steps, measure(cell, rounds, steps, peer_environments))


def measure(cell: Cell, rounds: int, steps: int, peer_environments: Path) -> list[Measurement]:
    """Runs the contestants by turns, so that what slows the machine slows all of them."""
    pythons = [contestant.python(peer_environments) for contestant in CONTESTANTS]
    answers = []
    with ExitStack() as stack:
        processes = [
            stack.enter_context(ContestantProcess(contestant.name, python, contestant.script))
            for contestant, python in zip(CONTESTANTS, pythons, strict=True)
        ]
        for process in processes:
            process.send_cell(cell)
        ready = [process.receive(str(cell)) for process in processes]
        steps_done = ready[0]["steps_done"]
        for _ in range(rounds):
            answers.append([process.run_steps(steps) for process in processes])
            steps_done += steps
            check_losses(cell, steps_done, [answer["loss"] for answer in answers[-1]])
    return [
        Measurement(
            contestant=contestant.name,
            baseline=contestant.baseline,
            versions=ready[index]["versions"],
            seconds_per_step=[answer[index]["seconds_per_step"] for answer in answers],
            last_loss=answers[-1][index]["loss"],
        )
        for index, contestant in enumerate(CONTESTANTS)
    ]


def check_losses(cell: Cell, steps_done: int, losses: Sequence[float]) -> None:
    """Refuses to compare the times of contestants that do not train the same."""
    first, expected = CONTESTANTS[0], losses[0]
    for contestant, loss in zip(CONTESTANTS, losses, strict=True):
        # Written so that a loss of NaN fails as well.
        if not math.isclose(loss, expected, rel_tol=LOSS_TOLERANCE):
            raise click.ClickException(
                f"After {steps_done} steps of the {cell}, the loss of {first.name} is "
                f"{expected:.7g} and that of {contestant.name} is {loss:.7g}. More than "
                f"{LOSS_TOLERANCE:g} of difference: they do not train the same, and their times "
                "cannot be compared. Mend the one that is wrong."
            )


if __name__ == "__main__":
    main()
