"""Asks `contestants/tiny_step.py`, a process each time: the number of devices is fixed in one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
from report import announce

SCRIPT = Path(__file__).parent / "contestants" / "tiny_step.py"
LIMIT_SECONDS = 180
STDERR_LINES_SHOWN = 20


@dataclass(frozen=True)
class TinyStep:
    """How many of what: the question."""

    replicas: int
    variables: int
    rounds: int
    calls: int  # of a round
    compiles: int


@dataclass(frozen=True)
class TinyTimes:
    """Seconds, the answer: of the median call of each round, and of each first call."""

    asked: TinyStep
    replicax: Sequence[float]
    jax: Sequence[float]
    replicax_first: Sequence[float]
    jax_first: Sequence[float]
    versions: Mapping[str, str]

    @property
    def overheads(self) -> list[float]:
        """By how many seconds a call of replicax takes longer, in each round."""
        return [mine - theirs for mine, theirs in zip(self.replicax, self.jax, strict=True)]

    @property
    def overhead(self) -> float:
        return median(self.overheads)


def measure_tiny_step(asked: TinyStep) -> TinyTimes:
    announce(f"a tiny step, {asked.variables} variables, {asked.replicas} replicas")
    try:
        done = subprocess.run(
            [sys.executable, SCRIPT, json.dumps(asdict(asked))],
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise click.ClickException(
            f"{SCRIPT.name} did not end within {LIMIT_SECONDS} s and was killed: {asked}."
        ) from error
    if done.returncode:
        lines = done.stderr.splitlines()[-STDERR_LINES_SHOWN:]
        raise click.ClickException(
            "\n".join(
                [
                    f"{SCRIPT.name} ended with exit code {done.returncode}: {asked}. The last "
                    "lines of its stderr:",
                    *lines,
                ]
            )
        )
    answer = json.loads(done.stdout)
    return TinyTimes(
        asked=asked,
        replicax=answer["later_calls"]["replicax"],
        jax=answer["later_calls"]["jax"],
        replicax_first=answer["first_calls"]["replicax"],
        jax_first=answer["first_calls"]["jax"],
        versions=answer["versions"],
    )
