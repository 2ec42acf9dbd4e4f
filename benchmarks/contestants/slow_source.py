"""Epochs over a slow source, under a step that takes as long as the source does.

Run as `slow_source.py '{"cell": {"hidden": 512, "global_batch": 256, "replicas": 2}, "epochs": 5,
"steps": 200, "source_seconds": 0.005, "step_seconds": 0.005}'`, it prints one line of JSON;
feeding.py asks.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping

import numpy as np
from _batches import arrays_of
from _problem import Cell
from _replicax import mirrored_strategy


def measure(
    *,
    cell: Mapping[str, int],
    epochs: int,
    steps: int,
    source_seconds: float,
    step_seconds: float,
) -> dict[str, list[float]]:
    """Measure the seconds of each epoch, from `iter` to its end."""
    asked = Cell(**cell)
    rows, labels = (array[: asked.global_batch] for array in arrays_of(asked))

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for _ in range(steps):
            time.sleep(source_seconds)
            yield rows, labels

    dataset = mirrored_strategy(asked.replicas).experimental_distribute_dataset(batches)

    def epoch() -> float:
        start = time.perf_counter()
        taken = 0
        for _ in dataset:
            # This stands for a step on a busy device: the host waits, without the GIL.
            time.sleep(step_seconds)
            taken += 1
        seconds = time.perf_counter() - start
        if taken != steps:
            raise AssertionError(f"The epoch has {steps} batches, and there were {taken}.")
        return seconds

    epoch()  # the first one pays for what is made on first use
    return {"epoch_seconds": [epoch() for _ in range(epochs)]}


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
