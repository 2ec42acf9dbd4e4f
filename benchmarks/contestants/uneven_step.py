"""A training step whose replicas have different numbers of rows, after steps of full batches.

Run as `uneven_step.py '{"model": "optax", "eager": false, "rounds": 20}'`, it prints one line of
JSON; uneven_steps.py asks. `eager` runs the uneven steps as Python, on the replicas in turn, as
happens to steps that are not a single program.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _protocol import with_python
from _replicax import TRAINING_VERSIONS, mirrored_strategy

import replicax as rx

REPLICAS, FULL, UNEVEN = 2, 64, 61
FEATURES, HIDDEN, CLASSES = 64, 32, 10
Step = Callable[[Any, Any], jax.Array]


def optax_step(strategy: rx.Strategy) -> Step:
    """Make a step of a network of two layers, with Adam of Optax."""
    numbers = np.random.default_rng(0)
    with strategy.scope():
        weights = [
            rx.Variable(numbers.normal(scale=0.1, size=shape).astype(np.float32))
            for shape in ((FEATURES, HIDDEN), (HIDDEN, CLASSES))
        ]
        optimizer = rx.Optimizer(optax.adam(1e-3))

    def loss_of(rows: jax.Array, labels: jax.Array) -> jax.Array:
        logits = jnp.maximum(rows @ weights[0].value, 0) @ weights[1].value
        likelihoods = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -likelihoods.sum() / FULL

    def step(rows: jax.Array, labels: jax.Array) -> jax.Array:
        loss, gradients = rx.value_and_grad(loss_of, weights)(rows, labels)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    return step


def keras_step(strategy: rx.Strategy) -> Step:
    """Make a step of a small convolutional network of Keras, with its Adam and a metric."""
    import keras

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((FEATURES,)),
                keras.layers.Reshape((8, 8, 1)),
                keras.layers.Conv2D(8, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(HIDDEN, activation="relu"),
                keras.layers.Dense(CLASSES),
            ]
        )
        optimizer = keras.optimizers.Adam(1e-3)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(rows: jax.Array, labels: jax.Array) -> jax.Array:
        def loss_of() -> tuple[jax.Array, jax.Array]:
            logits = model(rows, training=True)
            return jnp.sum(losses(labels, logits)) / FULL, logits

        variables = model.trainable_variables
        (loss, logits), gradients = rx.value_and_grad(loss_of, variables, has_aux=True)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        accuracy.update_state(labels, logits)
        return loss

    return step


def measure(*, model: str, eager: bool, rounds: int) -> dict[str, object]:
    """Measure the seconds of the first uneven step, and of later ones in turns with full ones."""
    strategy = mirrored_strategy(REPLICAS)
    step = {"optax": optax_step, "keras": keras_step}[model](strategy)
    compilations: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, seconds, **_: (
            compilations.append(seconds) if name.endswith("backend_compile_duration") else None
        )
    )

    @rx.function
    def train(rows: Any, labels: Any) -> jax.Array:
        losses = strategy.run(step, args=(rows, labels))
        return strategy.reduce(rx.ReduceOp.SUM, losses, axis=None)

    def seconds_of(iterator: Any, *, eagerly: bool = False) -> float:
        batch = next(iterator)
        rx.config.run_functions_eagerly(eagerly)
        start = time.perf_counter()
        train(*batch).block_until_ready()
        return time.perf_counter() - start

    full_batches, uneven_batches = batches_of(strategy, FULL), batches_of(strategy, UNEVEN)
    first_full = seconds_of(full_batches)
    for _ in range(10):
        seconds_of(full_batches)
    before = len(compilations)
    first = seconds_of(uneven_batches, eagerly=eager)
    compiled = len(compilations) - before
    seconds_of(full_batches)
    turns = [
        (seconds_of(full_batches), seconds_of(uneven_batches, eagerly=eager)) for _ in range(rounds)
    ]
    full, uneven = zip(*turns, strict=True)
    full_batches.close()
    uneven_batches.close()
    return {
        "first_full": first_full,
        "first": first,
        "compilations": compiled,
        "full": full,
        "uneven": uneven,
        "versions": with_python(TRAINING_VERSIONS),
    }


def batches_of(strategy: rx.Strategy, count: int) -> Any:
    """Return an endless iterator over batches of so many rows."""
    numbers = np.random.default_rng(count)
    rows = numbers.normal(size=(count, FEATURES)).astype(np.float32)
    labels = numbers.integers(0, CLASSES, count).astype(np.int32)
    batches = rx.from_tensor_slices((rows, labels)).batch(count).repeat()
    return iter(strategy.experimental_distribute_dataset(batches))


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
