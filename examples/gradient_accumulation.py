"""A batch that does not fit: gradients of several small batches, applied together.

    python examples/gradient_accumulation.py

Each replica adds up its own gradients in an ON_READ variable, which costs no communication. Every
`ACCUMULATE` steps they are summed over the replicas and applied, inside `lax.cond`. The same with
`optax.MultiSteps`, which accumulates after the sum, follows below; both end at the same weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ACCUMULATE, STEPS, BATCH = 4, 40, 8
RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(STEPS * BATCH, 3)).astype(np.float32)
LABELS = FEATURES @ np.array([[1], [-2], [0.5]], np.float32)


def batches(strategy: rx.Strategy) -> rx.DistributedDataset:
    return strategy.experimental_distribute_dataset(
        rx.from_tensor_slices((FEATURES, LABELS)).batch(BATCH)
    )


def with_cond(strategy: rx.Strategy) -> np.ndarray:
    with strategy.scope():
        weights = rx.Variable(np.zeros((3, 1), np.float32))
        accumulated = rx.Variable(
            np.zeros((3, 1), np.float32),
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )
        optimizer = rx.Optimizer(optax.sgd(0.05))

    @rx.function
    def train_step(x: rx.PerReplica, y: rx.PerReplica, last: jax.Array) -> None:
        def replica_step(x: jax.Array, y: jax.Array, last: jax.Array) -> None:
            gradient = rx.grad(lambda: jnp.sum((x @ weights - y) ** 2) / BATCH, weights)()
            accumulated.assign_add(gradient)

            def apply() -> int:
                optimizer.apply_gradients([(accumulated / ACCUMULATE, weights)])
                accumulated.assign(jnp.zeros((3, 1)))
                return 0

            jax.lax.cond(last, apply, lambda: 0)

        strategy.run(replica_step, args=(x, y, last))

    for step, (x, y) in enumerate(batches(strategy)):
        last = jnp.asarray(step % ACCUMULATE == ACCUMULATE - 1)
        train_step(x, y, last)
    return weights.numpy()


def with_multi_steps(strategy: rx.Strategy) -> np.ndarray:
    with strategy.scope():
        weights = rx.Variable(np.zeros((3, 1), np.float32))
        optimizer = rx.Optimizer(optax.MultiSteps(optax.sgd(0.05), every_k_schedule=ACCUMULATE))

    @rx.function
    def train_step(x: rx.PerReplica, y: rx.PerReplica) -> None:
        def replica_step(x: jax.Array, y: jax.Array) -> None:
            gradient = rx.grad(lambda: jnp.sum((x @ weights - y) ** 2) / BATCH, weights)()
            optimizer.apply_gradients([(gradient, weights)])

        strategy.run(replica_step, args=(x, y))

    for x, y in batches(strategy):
        train_step(x, y)
    return weights.numpy()


def main() -> tuple[np.ndarray, np.ndarray]:
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    by_cond, by_optax = with_cond(strategy), with_multi_steps(strategy)
    print("weights with lax.cond:        ", by_cond.ravel())
    print("weights with optax.MultiSteps:", by_optax.ravel())
    return by_cond, by_optax


if __name__ == "__main__":
    main()
