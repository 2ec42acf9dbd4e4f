"""The smallest possible step, in replicax and by hand in JAX: the cost of first and later calls.

The contestants that are asked for run in one process, on the same devices. Run as
`tiny_step.py '{"contestants": ["replicax", "jax"], "program": {"variables": 10}, "replicas": 2,
"workers": 1, "collective": false, "rounds": 7, "calls": 200, "compiles": 3}'`, it prints one line
of JSON; overhead.py, scaling.py and growth.py ask. Several workers have one replica each.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Protocol

import jax
from _protocol import with_python
from _tiny_jax import Jax, Step
from _tiny_program import Program
from _workers import Worker, answer_question
from jax_shard_map import use_cpus

WARMUP_CALLS = 10
BYTES_OF_MAXRSS = 1 if sys.platform == "darwin" else 1024


class Contestant(Protocol):
    def build(self, *, collective: bool) -> Step:
        """Make a step that is not compiled yet; its result is summed over replicas if `collective`.

        When called, it returns an array to wait for.
        """
        ...

    def value(self) -> float:
        """Return the value of a variable."""
        ...


Make = Callable[[Program], Contestant]


def join(
    contestants: Sequence[str], replicas: int, worker: Worker | None
) -> tuple[Mapping[str, Make], Mapping[str, str]]:
    """Start JAX on the replicas; return what makes each contestant, and the versions."""
    by_hand = partial(Jax, replicas=replicas)
    if "replicax" not in contestants:
        use_cpus(replicas, worker)
        return {"jax": by_hand}, {"jax": jax.__version__}
    # These are imported here because their memory is not part of what JAX takes by itself.
    from _replicax import VERSIONS, strategy_of
    from _tiny_replicax import Replicax

    strategy = strategy_of(replicas, worker)
    makes = {"replicax": partial(Replicax, strategy=strategy), "jax": by_hand}
    return {name: makes[name] for name in contestants}, VERSIONS


def measure(
    *,
    contestants: Sequence[str],
    program: Mapping[str, int],
    replicas: int,
    collective: bool,
    rounds: int,
    calls: int,
    compiles: int,
    worker: Worker | None,
) -> dict[str, object]:
    """Measure the seconds of each first call, and of the median later call of each round.

    The first calls are those of programs with a collective; `collective` says whether the later
    ones have one as well.
    """
    makes, versions = join(contestants, replicas, worker)
    # The very first compilation costs more, and is not measured.
    for make in makes.values():
        seconds_of(make(Program()).build(collective=True))
    made = {name: make(Program(**program)) for name, make in makes.items()}
    first_calls, steps = [], []
    for _ in range(compiles):
        steps = [contestant.build(collective=True) for contestant in made.values()]
        first_calls += take_turns(steps, calls=1)
    if not (collective and steps):
        steps = [contestant.build(collective=collective) for contestant in made.values()]
    take_turns(steps, WARMUP_CALLS)
    later_calls = [
        [median(seconds) for seconds in zip(*take_turns(steps, calls), strict=True)]
        for _ in range(rounds)
    ]
    expected = compiles + WARMUP_CALLS + rounds * calls
    for name, contestant in made.items():
        if contestant.value() != expected:
            raise AssertionError(
                f"{name} took {expected} steps, and its variables are {contestant.value()}. They "
                "should be equal."
            )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "first_calls": {name: [row[i] for row in first_calls] for i, name in enumerate(made)},
        "later_calls": {name: [row[i] for row in later_calls] for i, name in enumerate(made)},
        "peak_bytes": peak * BYTES_OF_MAXRSS,
        "versions": with_python(versions),
    }


def take_turns(steps: Sequence[Step], calls: int) -> list[list[float]]:
    """Return a row per turn: the seconds of one call of each step."""
    return [[seconds_of(step) for step in steps] for _ in range(calls)]


def seconds_of(step: Step) -> float:
    start = time.perf_counter()
    step().block_until_ready()
    return time.perf_counter() - start


if __name__ == "__main__":
    answer_question(measure)
