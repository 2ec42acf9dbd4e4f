"""replicax: `fit` of a Keras model made in the scope of a strategy."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
from _keras import model_of, serve_fit
from _problem import Cell
from _replicax import VERSIONS, mirrored_strategy


def make_model(cell: Cell) -> keras.Model:
    with mirrored_strategy(cell.replicas).scope():
        return model_of(cell)


if __name__ == "__main__":
    serve_fit(make_model, VERSIONS)
