"""The contestant's half of the line protocol; `processes.py` holds the other half.

run.py                                                    contestant
{"hidden": 32, "global_batch": 64, "replicas": 2}   ->    builds, then warms up
                                                    <-    {"steps_done": 5, "versions": {…}}
steps 20                                            ->    runs 20 steps
                                                    <-    {"seconds_per_step": …, "loss": …}
end of input                                        ->    ends
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping

from _problem import Cell

# The first steps trace, compile and fill caches. Every contestant takes the same number of them,
# or the losses could not be compared.
WARMUP_STEPS = 5


def serve(
    build: Callable[[Cell], Callable[[], float]],
    versions: Mapping[str, str],
    *,
    before_steps: Callable[[int], None] = lambda steps: None,
) -> None:
    """Answers requests until the input ends.

    Args:
        build: Makes, for a cell, the function that takes one training step and returns its loss.
        versions: The packages under test, for the report.
        before_steps: Called with the number of steps before each timed turn.
    """
    # A library that prints to stdout would break the protocol: from here on it prints to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(message: Mapping[str, object]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    train = build(Cell(**json.loads(sys.stdin.readline())))
    for _ in range(WARMUP_STEPS):
        train()
    answer(
        {
            "steps_done": WARMUP_STEPS,
            "versions": {"python": platform.python_version(), **versions},
        }
    )
    for request in sys.stdin:
        verb, count = request.split()
        if verb != "steps":
            raise ValueError(f"Unknown request {request!r}. Send 'steps N'.")
        before_steps(int(count))
        answer(_timed(train, int(count)))


def _timed(train: Callable[[], float], steps: int) -> dict[str, float]:
    loss = float("nan")
    start = time.perf_counter()
    for _ in range(steps):
        loss = train()
    return {"seconds_per_step": (time.perf_counter() - start) / steps, "loss": loss}
