"""replicax: `MultiWorkerMirroredStrategy`, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _problem import Cell, problem_of
from _replicax import TRAINING_VERSIONS, constant_batch, multi_worker_strategy, training_of
from _workers import Worker, serve_workers

import replicax as rx


def build(cell: Cell, worker: Worker) -> Callable[[], Any]:
    strategy = multi_worker_strategy(worker)
    train = rx.function(training_of(cell, strategy))
    batch = constant_batch(problem_of(cell), strategy)
    return lambda: train(*batch)


if __name__ == "__main__":
    serve_workers(build, TRAINING_VERSIONS)
