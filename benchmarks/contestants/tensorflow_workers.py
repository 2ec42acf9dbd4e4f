"""TensorFlow: `tf.distribute.MultiWorkerMirroredStrategy` inside a `tf.function`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from _problem import Cell, problem_of
from _tensorflow import VERSIONS, constant_batch, training_of
from _workers import Worker, serve_workers


def build(cell: Cell, worker: Worker) -> Callable[[], Any]:
    strategy = join(worker)
    train = tf.function(training_of(cell, strategy))
    batch = constant_batch(problem_of(cell), strategy, ["CPU:0"] * cell.replicas)
    return lambda: train(*batch)


def join(worker: Worker) -> tf.distribute.Strategy:
    os.environ["TF_CONFIG"] = worker.tf_config
    return tf.distribute.MultiWorkerMirroredStrategy()


if __name__ == "__main__":
    serve_workers(build, VERSIONS)
