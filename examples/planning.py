"""Plan how much of a TPU a step needs, before there is one.

    python examples/planning.py
    replicax plan examples/planning.py:program --topology v5e:2x2 --topology v5e:16x16

`program` builds a step for whatever strategy it is given. Two virtual devices train with it; then
the same step is planned, which computes nothing. For TPUs, `pip install 'replicax[tpu]'`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

SIZES = (784, 2048, 2048, 10)
ROWS = 64  # of a replica


def program(strategy: rx.Strategy) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    batch = ROWS * strategy.num_replicas_in_sync
    with strategy.scope():
        weights = [
            rx.Variable(
                # A callable, so that nothing is computed where only its shape matters.
                lambda a=a, b=b: jax.random.normal(jax.random.key(a), (a, b)) / np.sqrt(a),
                name=f"weight_{number}",
            )
            for number, (a, b) in enumerate(itertools.pairwise(SIZES))
        ]
        optimizer = rx.Optimizer(optax.sgd(0.01, momentum=0.9))

    def replica_step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss() -> jax.Array:
            hidden = x
            for weight in weights[:-1]:
                hidden = jax.nn.relu(hidden @ weight)
            logits = hidden @ weights[-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).sum() / batch

        value, gradients = rx.value_and_grad(loss, weights)()
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return value

    @rx.function
    def step(x: rx.PerReplica, y: rx.PerReplica) -> jax.Array:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    return step, (
        jax.ShapeDtypeStruct((batch, SIZES[0]), jnp.float32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )


def main() -> tuple[list[float], rx.planning.Plan]:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    step, _ = program(strategy)
    random = np.random.default_rng(0)
    features = random.normal(size=(8 * ROWS, SIZES[0])).astype(np.float32)
    labels = np.argmax(features[:, :10], axis=1).astype(np.int32)
    dataset = rx.from_tensor_slices((features, labels)).batch(2 * ROWS)
    losses = [float(step(x, y)) for x, y in strategy.experimental_distribute_dataset(dataset)]
    print("losses:", losses)
    plan = rx.planning.plan(program, "cpu:2")
    print(plan)
    return losses, plan


if __name__ == "__main__":
    main()
