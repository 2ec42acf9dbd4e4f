"""Questions to `contestants/tiny_step.py`, and its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from processes import ask
from report import announce


@dataclass(frozen=True)
class TinyStep:
    """The question: the numbers of replicas, variables, rounds, calls and compilations."""

    replicas: int
    variables: int
    rounds: int
    calls: int  # per round
    compiles: int


@dataclass(frozen=True)
class TinyTimes:
    """The answer: the seconds of the median call of each round, and of each first call."""

    asked: TinyStep
    replicax: Sequence[float]
    jax: Sequence[float]
    replicax_first: Sequence[float]
    jax_first: Sequence[float]
    versions: Mapping[str, str]

    @property
    def overheads(self) -> list[float]:
        """The seconds that replicax adds to a call, in each round."""
        return [mine - theirs for mine, theirs in zip(self.replicax, self.jax, strict=True)]

    @property
    def overhead(self) -> float:
        return median(self.overheads)


def measure_tiny_step(asked: TinyStep) -> TinyTimes:
    announce(f"a tiny step, {asked.variables} variables, {asked.replicas} replicas")
    answer = ask("tiny_step.py", asdict(asked))
    return TinyTimes(
        asked=asked,
        replicax=answer["later_calls"]["replicax"],
        jax=answer["later_calls"]["jax"],
        replicax_first=answer["first_calls"]["replicax"],
        jax_first=answer["first_calls"]["jax"],
        versions=answer["versions"],
    )
