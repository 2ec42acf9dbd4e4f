"""replicax: `MultiWorkerMirroredStrategy`, compiled."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
from _problem import Cell, problem_of
from _replicax import TRAINING_VERSIONS, constant_batch, training_of
from _workers import Worker, serve_workers

import replicax as rx


def build(cell: Cell, worker: Worker) -> Callable[[], Any]:
    strategy = join(worker)
    train = rx.function(training_of(cell, strategy))
    batch = constant_batch(problem_of(cell), strategy)
    return lambda: train(*batch)


def join(worker: Worker) -> rx.Strategy:
    jax.config.update("jax_platforms", "cpu")
    os.environ["TF_CONFIG"] = worker.tf_config
    return rx.MultiWorkerMirroredStrategy()


if __name__ == "__main__":
    serve_workers(build, TRAINING_VERSIONS)
