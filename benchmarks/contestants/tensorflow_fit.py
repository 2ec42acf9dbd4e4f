"""TensorFlow: `fit` of a Keras model made in the scope of `tf.distribute.MirroredStrategy`."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import tensorflow as tf
from _keras import model_of, serve_fit
from _problem import Cell
from _tensorflow import VERSIONS, split_cpu


def make_model(cell: Cell) -> keras.Model:
    with tf.distribute.MirroredStrategy(split_cpu(cell.replicas)).scope():
        return model_of(cell)


if __name__ == "__main__":
    serve_fit(make_model, VERSIONS)
