"""The contestant's half of the line protocol; `processes.py` holds the other half.

run.py                                                    contestant
{"hidden": 32, "global_batch": 64, "replicas": 2}   ->    builds, then warms up
                                                    <-    {"steps_done": 5, "first_step_seconds": …,
                                                           "versions": {…}}
steps 20                                            ->    runs 20 steps
                                                    <-    {"seconds_per_step": …, "result": …}
end of input                                        ->    ends
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from _problem import AnyCell, Cell, ModelCell

# The first steps trace, compile and fill caches. Every contestant takes the same number of them,
# or the results could not be compared.
WARMUP_STEPS = 5


def serve(
    build: Callable[[Any], Callable[[], Any]],
    versions: Mapping[str, str],
    *,
    warmup_steps: int = WARMUP_STEPS,
    fetch: Callable[[Any], Any] = lambda returned: returned,
    result_of: Callable[[Any], float] = float,
    before_steps: Callable[[int], None] = lambda steps: None,
    after_steps: Callable[[], None] = lambda: None,
) -> None:
    """Answer requests until the input ends.

    Args:
        build: Makes, for a cell, the function that takes one step; a training step returns its
            loss.
        versions: The packages under test, for the report.
        warmup_steps: The number of steps before the first turn, at least two. The first of them is
            timed by itself.
        fetch: Called with what the last step of a turn returned, for steps that return before they
            are done. It is timed.
        result_of: Makes a number of what was fetched, on which all contestants must agree. It is
            not timed.
        before_steps: Called with the number of steps before each timed turn.
        after_steps: Called after each turn and after the warm-up, before the answer.
    """
    answers = answers_only()

    def answer(message: Mapping[str, object]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    step = build(cell_of(json.loads(sys.stdin.readline())))
    first_step_seconds, _ = take_steps(step, 1, fetch)
    take_steps(step, warmup_steps - 1, fetch)
    after_steps()
    answer(
        {
            "steps_done": warmup_steps,
            "first_step_seconds": first_step_seconds,
            "versions": with_python(versions),
        }
    )
    for request in sys.stdin:
        verb, count = request.split()
        if verb != "steps":
            raise ValueError(f"Unknown request {request!r}. Send 'steps N'.")
        before_steps(int(count))
        seconds, returned = take_steps(step, int(count), fetch)
        after_steps()
        answer({"seconds_per_step": seconds, "result": result_of(returned)})


def cell_of(fields: Mapping[str, Any]) -> AnyCell:
    return (ModelCell if "model" in fields else Cell)(**fields)


def answers_only() -> TextIO:
    """Return stdout for answers only: a library that prints there would break the protocol.

    From here on everything else is printed to stderr.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def take_steps(
    step: Callable[[], Any], steps: int, fetch: Callable[[Any], Any] = lambda returned: returned
) -> tuple[float, Any]:
    """Take steps; return the seconds per step, and what was fetched of the last result."""
    returned = None
    start = time.perf_counter()
    for _ in range(steps):
        returned = step()
    fetched = fetch(returned)
    return (time.perf_counter() - start) / steps, fetched


def with_python(versions: Mapping[str, str]) -> dict[str, str]:
    return {"python": platform.python_version(), **versions}
