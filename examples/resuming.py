"""Goes on with a training run exactly where it was interrupted, in the middle of an epoch.

    python examples/resuming.py

The state of the iterator, saved together with the variables, says which rows have been seen.
Another process, with another number of replicas, sees the others, each once.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, EPOCHS = 100, 8, 4
RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(ROWS, 3)).astype(np.float32)
LABELS = FEATURES @ np.float32([1.0, -2.0, 0.5]) + RANDOM.normal(size=ROWS).astype(np.float32) / 10


def train(replicas: int, directory: Path, *, interrupt_after: int | None = None) -> np.ndarray:
    """Trains to the end, or until it is interrupted; goes on from what is saved, if anything is."""
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    pipeline = rx.from_tensor_slices((FEATURES, LABELS)).shuffle(seed=1).batch(BATCH).repeat(EPOCHS)
    iterator = iter(strategy.experimental_distribute_dataset(pipeline))
    with strategy.scope():
        weights = rx.Variable(np.zeros(3, np.float32))
        optimizer = rx.Optimizer(optax.sgd(0.05))

    def replica_step(x, y):
        def loss_fn():
            return jnp.sum((x @ weights - y) ** 2) / BATCH

        (gradient,) = rx.grad(loss_fn, [weights])()
        optimizer.apply_gradients([(gradient, weights)])

    @rx.function
    def train_step(iterator):
        strategy.run(replica_step, args=next(iterator))

    saved = directory / "saved.json"
    if saved.exists():
        state = json.loads(saved.read_text())
        weights.assign(np.float32(state["weights"]))
        iterator.set_state(state["iterator"])
        print(f"Going on after step {state['iterator']['steps']} on {replicas} replicas.")

    while (state := iterator.get_state())["steps"] != interrupt_after:
        saved.write_text(json.dumps({"weights": weights.numpy().tolist(), "iterator": state}))
        try:
            train_step(iterator)
        except StopIteration:
            return weights.numpy()
    print(f"Interrupted after step {interrupt_after} on {replicas} replicas.")
    iterator.close()
    return weights.numpy()


def main() -> tuple[np.ndarray, np.ndarray]:
    """Both ways to train: in one go, and in two."""
    with tempfile.TemporaryDirectory() as directory:
        undisturbed = train(2, Path(directory))
    with tempfile.TemporaryDirectory() as directory:
        train(2, Path(directory), interrupt_after=17)
        resumed = train(4, Path(directory))
    print(f"Undisturbed:            {undisturbed}")
    print(f"Interrupted, continued: {resumed}")
    return undisturbed, resumed


if __name__ == "__main__":
    rx.config.set_logical_cpu_devices(4)
    main()
