"""replicax: a model people know and Adam, on the replicas of one process or on `workers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _operations_jax
import jax
import optax
from _models import EPSILON, MODELS, model_problem_of
from _problem import ModelCell
from _replicax import TRAINING_VERSIONS, constant_batch, strategy_of
from _workers import Worker, serve_replicas_or_workers

import replicax as rx


def build(cell: ModelCell, worker: Worker | None) -> Callable[[], Any]:
    strategy = strategy_of(cell.replicas, worker)
    model, problem = MODELS[cell.model], model_problem_of(cell)
    with strategy.scope():
        params = rx.make_variables(problem.params)
        optimizer = rx.Optimizer(optax.adam(cell.learning_rate, eps=EPSILON))

    def loss_of(rows: jax.Array, labels: jax.Array) -> jax.Array:
        return model.loss(_operations_jax, rx.read(params), rows, labels) / cell.replicas

    def step(rows: jax.Array, labels: jax.Array) -> jax.Array:
        loss, gradients = rx.value_and_grad(loss_of, params)(rows, labels)
        optimizer.apply_gradients(gradients, params)
        return loss

    @rx.function
    def train(rows: Any, labels: Any) -> jax.Array:
        losses = strategy.run(step, args=(rows, labels))
        return strategy.reduce(rx.ReduceOp.SUM, losses, axis=None)

    batch = constant_batch(problem, strategy)
    return lambda: train(*batch)


if __name__ == "__main__":
    serve_replicas_or_workers(build, TRAINING_VERSIONS)
