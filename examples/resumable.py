"""Trains with two workers, one of which is killed now and then; the weights end up the same.

    replicax launch --workers 2 --max-restarts 3 examples/resumable.py --directory one --kills 3
    replicax launch --workers 2 examples/resumable.py --directory another

Every few steps a checkpoint is written in the background: the variables, the optimizer, and how far
the data has been read. A worker that kills itself (SIGKILL: it has no time for anything) takes the
other one with it, the launcher starts both again, and they go on from the latest checkpoint. The
last line is the same for both commands, to the last bit.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
from pathlib import Path

import click
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, EPOCHS = 96, 8, 5
STEPS = EPOCHS * ROWS // BATCH
RANDOM = np.random.default_rng(0)
FEATURES = RANDOM.normal(size=(ROWS, 3)).astype(np.float32)
NOISE = RANDOM.normal(size=ROWS).astype(np.float32) / 10
LABELS = FEATURES @ np.array([1.0, -2.0, 0.5], np.float32) + NOISE


class Accidents:
    """At which step of which worker this attempt ends; notes in `directory` what has happened."""

    def __init__(self, directory: Path, kills: int, worker: int) -> None:
        happened = len(list(directory.glob("killed-*")))
        self._note = directory / f"killed-{happened}"
        # Both workers draw the same numbers, and only one of them is meant.
        draw = random.Random(happened)
        victim, self._step = draw.randrange(2), draw.randint(5, 15)
        self._meant = happened < kills and victim == worker

    def may_happen(self) -> None:
        self._step -= 1
        if self._meant and self._step == 0:
            self._note.touch()
            print("This worker is killed.", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


@click.command()
@click.option("--directory", type=click.Path(path_type=Path), required=True, help="What to keep.")
@click.option("--kills", default=0, help="How many times a worker is killed, at a random step.")
def main(directory: Path, kills: int) -> None:
    """Train to the end, from wherever the last attempt has come to."""
    strategy = rx.MultiWorkerMirroredStrategy()
    directory.mkdir(parents=True, exist_ok=True)
    accidents = Accidents(directory, kills, strategy.cluster_resolver.task_id or 0)
    with strategy.scope():
        weights = rx.Variable(np.zeros(3, np.float32), name="weights")
        seen = rx.Variable(
            np.zeros((EPOCHS, ROWS), np.int32), synchronization="ON_READ", aggregation="SUM"
        )
        optimizer = rx.Optimizer(optax.adam(0.05))

    def replica_step(numbers, x, y):
        def loss_fn():
            return jnp.sum((x @ weights - y) ** 2) / BATCH

        epoch = optimizer.iterations.value // (ROWS // BATCH)
        (gradient,) = rx.grad(loss_fn, [weights])()
        optimizer.apply_gradients([(gradient, weights)])
        seen.assign_add(jnp.zeros((EPOCHS, ROWS), jnp.int32).at[epoch, numbers].add(1))

    @rx.function
    def train_step(batch):
        strategy.run(replica_step, args=batch)

    pipeline = rx.from_tensor_slices((np.arange(ROWS), FEATURES, LABELS)).shuffle(seed=1)
    dataset = strategy.experimental_distribute_dataset(
        pipeline.batch(BATCH).repeat(EPOCHS), rx.InputOptions(auto_shard_policy="DATA")
    )
    checkpoint = rx.Checkpoint(weights=weights, seen=seen, optimizer=optimizer, data=iter(dataset))
    with rx.CheckpointManager(
        checkpoint,
        directory / "checkpoints",
        max_to_keep=2,
        step_counter=optimizer.iterations,
        checkpoint_interval=4,
        asynchronous=True,
    ) as manager:
        if manager.restore_or_initialize():
            rx.print(f"Going on after step {int(optimizer.iterations)} of {STEPS}.")
        for batch in checkpoint.data:
            train_step(batch)
            manager.save()
            accidents.may_happen()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    once = bool((seen.numpy() == 1).all())
    rx.print(f"Every row was seen once in every epoch: {once}.")
    rx.print(f"Weights {weights.numpy().round(3).tolist()}, fingerprint {digest}.")


if __name__ == "__main__":
    main()
