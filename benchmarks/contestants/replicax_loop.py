"""replicax: as many training steps as the others take per call, each in a call of its own."""

from __future__ import annotations

from collections.abc import Callable

from _problem import STEPS_A_CALL, Cell
from _protocol import serve
from _replicax import TRAINING_VERSIONS, distributed_arrays, mirrored_strategy, training_of

import replicax as rx


def build(cell: Cell) -> Callable[[], float]:
    strategy = mirrored_strategy(cell.replicas)
    train = rx.function(training_of(cell, strategy))
    iterator = iter(distributed_arrays(cell, strategy))

    def steps() -> float:
        losses = [train(*next(iterator)) for _ in range(STEPS_A_CALL)]
        return float(losses[-1])  # the others are dispatched, and not awaited

    return steps


if __name__ == "__main__":
    serve(build, TRAINING_VERSIONS)
