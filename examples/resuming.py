"""Goes on with a training run exactly where it was interrupted, in the middle of an epoch.

    python examples/resuming.py

A checkpoint holds the variables, the optimizer, and which rows have been seen. Another process,
with another number of replicas, sees the others, each once.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, EPOCHS = 100, 8, 4
RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(ROWS, 3)).astype(np.float32)
NOISE = RANDOM.normal(size=ROWS).astype(np.float32) / 10
LABELS = FEATURES @ np.array([1.0, -2.0, 0.5], np.float32) + NOISE


def train(replicas: int, directory: Path, *, interrupt_after: int | None = None) -> np.ndarray:
    """Trains to the end, or until it is interrupted; goes on from what is saved, if anything is."""
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    pipeline = rx.from_tensor_slices((FEATURES, LABELS)).shuffle(seed=1).batch(BATCH).repeat(EPOCHS)
    iterator = iter(strategy.experimental_distribute_dataset(pipeline))
    with strategy.scope():
        weights = rx.Variable(np.zeros(3, np.float32))
        optimizer = rx.Optimizer(optax.adam(0.1))

    def replica_step(x, y):
        def loss_fn():
            return jnp.sum((x @ weights - y) ** 2) / BATCH

        (gradient,) = rx.grad(loss_fn, [weights])()
        optimizer.apply_gradients([(gradient, weights)])

    @rx.function
    def train_step(iterator):
        strategy.run(replica_step, args=next(iterator))

    checkpoint = rx.Checkpoint(weights=weights, optimizer=optimizer, data=iterator)
    with rx.CheckpointManager(
        checkpoint,
        directory,
        max_to_keep=1,
        step_counter=optimizer.iterations,
        checkpoint_interval=4,
    ) as manager:
        if manager.restore_or_initialize():
            print(f"Going on after step {int(optimizer.iterations)} on {replicas} replicas.")
        while int(optimizer.iterations) != interrupt_after:
            try:
                train_step(iterator)
            except StopIteration:
                return weights.numpy()
            manager.save()
    print(f"Interrupted after step {interrupt_after} on {replicas} replicas.")
    iterator.close()
    return weights.numpy()


def main() -> tuple[np.ndarray, np.ndarray]:
    """Both ways to train: in one go, and in two."""
    with tempfile.TemporaryDirectory() as directory:
        undisturbed = train(2, Path(directory))
    with tempfile.TemporaryDirectory() as directory:
        train(2, Path(directory), interrupt_after=19)
        resumed = train(4, Path(directory))
    print(f"Undisturbed:            {undisturbed}")
    print(f"Interrupted, continued: {resumed}")
    return undisturbed, resumed


if __name__ == "__main__":
    rx.config.set_logical_cpu_devices(4)
    main()
