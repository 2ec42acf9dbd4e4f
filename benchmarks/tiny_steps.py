"""Questions to `contestants/tiny_step.py`, and its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from contestants._tiny_program import Program
from processes import ask
from report import announce

CONTESTANTS = ("replicax", "jax")


@dataclass(frozen=True)
class TinyStep:
    """The question: what is run where and by whom, and how often."""

    program: Program
    replicas: int
    rounds: int
    calls: int  # per round
    compiles: int
    workers: int = 1
    contestants: Sequence[str] = CONTESTANTS  # of one process
    collective: bool = False  # in later calls; the first ones always have one

    def __str__(self) -> str:
        return (
            f"a tiny step by {' and '.join(self.contestants)}, {self.program}, replicas: "
            f"{self.replicas}, workers: {self.workers}"
        )


@dataclass(frozen=True)
class TinyTimes:
    """The answer: by contestant the seconds of each first call, and of each round's median call."""

    asked: TinyStep
    first_calls: Mapping[str, Sequence[float]]
    later_calls: Mapping[str, Sequence[float]]
    peak_bytes: int  # that were resident in the process, of worker 0 if there are several
    versions: Mapping[str, str]

    @property
    def overheads(self) -> list[float]:
        """The seconds that replicax adds to a call, in each round."""
        calls = [self.later_calls[contestant] for contestant in CONTESTANTS]
        return [mine - theirs for mine, theirs in zip(*calls, strict=True)]

    @property
    def overhead(self) -> float:
        return median(self.overheads)


def measure_tiny_step(asked: TinyStep) -> TinyTimes:
    announce(str(asked))
    return TinyTimes(asked, **ask("tiny_step.py", asdict(asked)))
