"""The shared part of replicax contestants: the training step, and the distributed dataset."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _batches import arrays_of
from _problem import Batch, Cell, problem_of
from _protocol import serve
from _workers import Worker

import replicax as rx

VERSIONS = {"replicax": rx.__version__, "jax": jax.__version__}
TRAINING_VERSIONS = {**VERSIONS, "optax": optax.__version__}


def mirrored_strategy(replicas: int) -> rx.Strategy:
    return rx.MirroredStrategy(cpus(replicas))


def build(cell: Cell, strategy: rx.Strategy, compiled: bool) -> Callable[[], float]:
    train = training_of(cell, strategy)
    batch = constant_batch(problem_of(cell), strategy)
    step_of_all = rx.function(train) if compiled else train
    return lambda: float(step_of_all(*batch))


def serve_replicax(compiled: bool, make: Callable[[int], rx.Strategy] = mirrored_strategy) -> None:
    """Serve training steps under the strategy that `make` makes for a number of replicas."""
    serve(lambda cell: build(cell, make(cell.replicas), compiled), TRAINING_VERSIONS)


def strategy_of(replicas: int, worker: Worker | None) -> rx.Strategy:
    """Make a strategy with all replicas in this process, or with one in each worker."""
    return mirrored_strategy(replicas) if worker is None else multi_worker_strategy(worker)


def multi_worker_strategy(worker: Worker) -> rx.Strategy:
    jax.config.update("jax_platforms", "cpu")
    os.environ["TF_CONFIG"] = worker.tf_config
    return rx.MultiWorkerMirroredStrategy()


def sharded_strategy(replicas: int) -> rx.Strategy:
    return rx.FullyShardedStrategy(cpus(replicas))


def cpus(count: int) -> list[str]:
    jax.config.update("jax_platforms", "cpu")  # so that a machine with a GPU measures the same
    return [f"CPU:{index}" for index in range(count)]


def training_of(cell: Cell, strategy: rx.Strategy) -> Callable[[Any, Any], jax.Array]:
    """Return a training step of all replicas, from rows and labels to the loss; not compiled."""
    problem = problem_of(cell)
    with strategy.scope():
        weights = [rx.Variable(weight) for weight in problem.weights]
        biases = [rx.Variable(bias) for bias in problem.biases]
        optimizer = rx.Optimizer(optax.sgd(cell.learning_rate))
    variables = [*weights, *biases]

    def loss_of(rows: jax.Array, labels: jax.Array) -> jax.Array:
        hidden = rows
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            hidden = jnp.maximum(hidden @ weight + bias, 0)
        logits = hidden @ weights[-1] + biases[-1]
        likelihoods = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -likelihoods.sum() / cell.global_batch

    def step(rows: jax.Array, labels: jax.Array) -> jax.Array:
        loss, gradients = rx.value_and_grad(loss_of, variables)(rows, labels)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def train(rows: Any, labels: Any) -> jax.Array:
        losses = strategy.run(step, args=(rows, labels))
        return strategy.reduce(rx.ReduceOp.SUM, losses, axis=None)

    return train


def constant_batch(batch: Batch, strategy: rx.Strategy) -> tuple[Any, Any]:
    """Return rows and labels, on the replicas' devices."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: (
            batch.rows[context.replica_id_in_sync_group],
            batch.labels[context.replica_id_in_sync_group],
        )
    )


def distributed_arrays(cell: Cell, strategy: rx.Strategy) -> rx.DistributedDataset:
    """Return batches of arrays in memory, repeated endlessly."""
    batches = rx.from_tensor_slices(arrays_of(cell)).batch(cell.global_batch).repeat()
    return strategy.experimental_distribute_dataset(batches)
