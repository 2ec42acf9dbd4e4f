"""Keras by itself, on JAX: `fit` under `keras.distribution.DataParallel`."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
from _keras import model_of, serve_fit
from _problem import Cell
from jax_shard_map import use_cpus


def make_model(cell: Cell) -> keras.Model:
    use_cpus(cell.replicas)
    # XLA:CPU has as many threads as there are cores. Two for two devices are too few for steps that
    # are not awaited: they hang in an all-reduce, and XLA then aborts the process.
    os.environ["NPROC"] = str(max(os.cpu_count() or 1, 2 * cell.replicas))
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return model_of(cell)


if __name__ == "__main__":
    serve_fit(make_model, {"jax": jax.__version__})
