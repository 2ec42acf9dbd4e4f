"""Trains with checkpoints; each time it is started, one worker kills itself at one moment.

Called with the layout of its state, a directory and the moments, such as `0:committing 1:between`:
a worker and what it is about to do. What has happened is noted in the directory, so that the next
start takes the next one.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, EPOCHS, INTERVAL = 20, 4, 8, 2
STEPS_PER_EPOCH = ROWS // BATCH


RENAMED = {  # what is about to get its name
    "writing": r"/parts-\d\.writing-\w+/checkpoint$",
    "committing": r"ckpt-\d+\.writing-\w+/checkpoint$",
}


class Killer:
    """Kills this process when the moment has come, not before the second checkpoint."""

    def __init__(self, directory: Path, moments: list[str], worker: int) -> None:
        done = len(list(directory.glob("killed-*")))
        self._note = directory / f"killed-{done}"
        victim, self._moment = (moments[done] if done < len(moments) else ":").split(":")
        self._mine = victim == str(worker)
        self.armed = False
        if self._mine and self._moment in RENAMED:
            sys.addaudithook(self._audit)

    def at(self, moment: str) -> None:
        if self._mine and self.armed and moment == self._moment:
            self._kill()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        renamed = self.armed and event == "os.rename"
        if renamed and re.search(RENAMED[self._moment], str(arguments[0])):
            self._kill()

    def _kill(self) -> None:
        self.armed = False
        self._note.touch()
        print(f"killed while {self._moment}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


def main(layout: str, directory: Path, moments: list[str]) -> None:
    strategy = (
        rx.MultiWorkerFullyShardedStrategy(
            variable_partitioner=rx.experimental.partitioners.FixedShardsPartitioner(2)
        )
        if layout == "sharded"
        else rx.MultiWorkerMirroredStrategy()
    )
    killer = Killer(directory, moments, strategy.cluster_resolver.task_id)
    with strategy.scope():
        weight = rx.Variable(np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(2, 3))
        seen = rx.Variable(
            np.zeros((EPOCHS, ROWS), np.int32), synchronization="ON_READ", aggregation="SUM"
        )
        step_count = rx.Variable(0, aggregation="ONLY_FIRST_REPLICA")
        optimizer = rx.Optimizer(optax.adam(0.05))
    rows = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(np.float32)
    pipeline = rx.from_tensor_slices((np.arange(ROWS), rows)).shuffle(seed=3).batch(BATCH)
    options = rx.InputOptions(auto_shard_policy="DATA")
    iterator = iter(strategy.experimental_distribute_dataset(pipeline.repeat(EPOCHS), options))

    @rx.function
    def train_step(batch):
        def replica(numbers, rows):
            loss = lambda: jnp.sum(jnp.tanh(rows @ weight) ** 2) / BATCH  # noqa: E731
            (gradient,) = rx.grad(loss, [weight])()
            optimizer.apply_gradients([(gradient, weight)])
            epoch = step_count.value // STEPS_PER_EPOCH
            seen.assign_add(jnp.zeros((EPOCHS, ROWS), jnp.int32).at[epoch, numbers].add(1))
            step_count.assign_add(1)

        strategy.run(replica, args=batch)

    checkpoint = rx.Checkpoint(
        weight=weight, seen=seen, step=step_count, optimizer=optimizer, data=iterator
    )
    manager = rx.CheckpointManager(
        checkpoint, directory / "checkpoints", max_to_keep=1, asynchronous=True
    )
    path = manager.restore_or_initialize()
    print(f"begins at step {int(step_count)}, {path and Path(path).name}", flush=True)
    saves = 0
    for batch in iterator:
        train_step(batch)
        killer.at("between")
        if int(step_count) % INTERVAL == 0:
            saves += 1
            killer.armed = saves == 2
            killer.at("before")
            manager.save()
            killer.at("during")
            manager.sync()
            killer.at("after")
    manager.close()
    print(f"weight {weight.numpy().tobytes().hex()}", flush=True)
    print(f"seen {sorted(set(seen.numpy().ravel().tolist()))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
