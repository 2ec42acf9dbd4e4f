"""TensorFlow: a model people know and Adam, on the replicas of one process or on `workers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _operations_tensorflow
import tensorflow as tf
from _models import EPSILON, MODELS, model_problem_of
from _problem import ModelCell
from _tensorflow import VERSIONS, constant_batch, split_cpu
from _workers import Worker, serve_replicas_or_workers
from tensorflow_workers import join


def build(cell: ModelCell, worker: Worker | None) -> Callable[[], Any]:
    if worker is None:
        devices = split_cpu(cell.replicas)
        strategy = tf.distribute.MirroredStrategy(devices)
    else:
        devices = ["CPU:0"] * cell.replicas
        strategy = join(worker)
    model, problem = MODELS[cell.model], model_problem_of(cell)
    with strategy.scope():
        params = {name: tf.Variable(array) for name, array in problem.params.items()}
        variables = list(params.values())
        optimizer = tf.keras.optimizers.Adam(cell.learning_rate, epsilon=EPSILON)
        optimizer.build(variables)

    def step(rows: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model.loss(_operations_tensorflow, params, rows, labels) / cell.replicas
        # The gradient of `tf.gather` is sparse, with several parts for a token that occurs often.
        # Keras' Adam would square each part instead of their sum: other steps than the others'.
        gradients = [tf.convert_to_tensor(each) for each in tape.gradient(loss, variables)]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    @tf.function
    def train(rows: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        losses = strategy.run(step, args=(rows, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    batch = constant_batch(problem, strategy, devices)
    return lambda: train(*batch)


if __name__ == "__main__":
    serve_replicas_or_workers(build, VERSIONS)
