"""JAX by hand: a model people know and Adam, on the devices of one process or on `workers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _operations_jax
import jax
import numpy as np
import optax
from _models import EPSILON, MODELS, model_problem_of
from _problem import ModelCell
from _workers import Worker, serve_replicas_or_workers
from jax_shard_map import AXIS, SPLIT, Training, use_cpus


def build(cell: ModelCell, worker: Worker | None) -> Callable[[], Any]:
    use_cpus(cell.replicas, worker)
    model, problem = MODELS[cell.model], model_problem_of(cell)
    adam = optax.adam(cell.learning_rate, eps=EPSILON)

    def loss_of(params: Any, rows: jax.Array, labels: jax.Array) -> jax.Array:
        return model.loss(_operations_jax, params, rows, labels) / cell.replicas

    def step(state: Any, rows: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        params, slots = state
        loss, gradients = jax.value_and_grad(loss_of)(params, rows, labels)
        gradients = jax.tree.map(lambda gradient: jax.lax.psum(gradient, AXIS), gradients)
        updates, slots = adam.update(gradients, slots, params)
        return (optax.apply_updates(params, updates), slots), jax.lax.psum(loss, AXIS)

    training = Training((problem.params, adam.init(problem.params)), step, SPLIT)
    batch = training.put((np.concatenate(problem.rows), np.concatenate(problem.labels)))
    return lambda: training.train(batch)


if __name__ == "__main__":
    serve_replicas_or_workers(build, {"jax": jax.__version__, "optax": optax.__version__})
