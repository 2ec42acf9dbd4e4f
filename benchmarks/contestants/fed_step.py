"""A compiled training step fed by a distributed dataset, and the same on one constant batch.

Both run in one process, with one program and one set of variables: only the input differs. Run as
`fed_step.py '{"cell": {"hidden": 512, "global_batch": 256, "replicas": 2}, "rounds": 20,
"steps": 10}'`, it prints one line of JSON; feeding.py asks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from _batches import BATCHES, arrays_of
from _problem import Cell, problem_of
from _protocol import WARMUP_STEPS, take_steps, with_python
from _replicax import (
    TRAINING_VERSIONS,
    constant_batch,
    distributed_arrays,
    mirrored_strategy,
    training_of,
)

import replicax as rx


def measure(*, cell: Mapping[str, int], rounds: int, steps: int) -> dict[str, object]:
    """Measure the seconds per step in each round; return them and the last loss."""
    asked = Cell(**cell)
    strategy = mirrored_strategy(asked.replicas)
    train = rx.function(training_of(asked, strategy))
    batch = constant_batch(problem_of(asked), strategy)
    iterator = iter(distributed_arrays(asked, strategy))
    step_of = {
        "constant batch": lambda: float(train(*batch)),
        "distributed dataset": lambda: float(train(*next(iterator))),
    }
    for step in step_of.values():
        take_steps(step, WARMUP_STEPS)
    taken = take_turns(step_of, rounds, steps)
    if train.tracing_count != 1:
        raise AssertionError(
            f"The step was compiled {train.tracing_count} times. Both inputs should run the same."
        )
    next_batch = [strategy.gather(value, axis=0) for value in next(iterator)]
    check_batch(next_batch, asked, (WARMUP_STEPS + rounds * steps) % BATCHES)
    iterator.close()
    return {
        "contestants": {
            name: {
                "seconds_per_step": [seconds for seconds, _ in turns],
                "last_result": turns[-1][1],
            }
            for name, turns in taken.items()
        },
        "versions": with_python(TRAINING_VERSIONS),
    }


def take_turns(
    step_of: Mapping[str, Callable[[], float]], rounds: int, steps: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds per step and the last loss of each turn, by name."""
    names = list(step_of)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            taken[name].append(take_steps(step_of[name], steps))
        names.reverse()  # they take turns in beginning a round
    return taken


def check_batch(gathered: Sequence[Any], cell: Cell, number: int) -> None:
    """Refuse the times of a dataset that does not give the rows in their order."""
    rows = slice(number * cell.global_batch, (number + 1) * cell.global_batch)
    for array, got in zip(arrays_of(cell), gathered, strict=True):
        if not np.array_equal(array[rows], got):
            raise AssertionError(
                f"The next batch should be number {number} of {BATCHES}, and it is not."
            )


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
