"""The training program that workers run in a trial: one event happens to it per attempt.

Called with a directory, the training as JSON, and how many steps an undisturbed run takes.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from chaos.schedules import Event, Input, Training, training_from_json

import replicax as rx

# Of workers for each other. On a busy machine one may need some seconds longer to start.
TIMEOUT_SECONDS = 15.0
# In the last steps the others do not need a worker any more, so that its loss is none.
_LAST_STEPS = 3


class Happening:
    """Makes the event of this attempt happen, when its time has come.

    A file in `directory` says that it has happened, with the addresses of the attempt in which it
    did. So the next attempt takes the next event, and workers of this one, which may start later,
    do not.
    """

    def __init__(self, directory: Path, training: Training, steps: int) -> None:
        told = json.loads(os.environ["TF_CONFIG"])
        cluster = " ".join(told["cluster"]["worker"])
        notes = list(directory.glob("happened-*"))
        number = sum(note.read_text() != cluster for note in notes)
        print(f"attempt for event {number} at {cluster}", flush=True)
        self._note, self._cluster = directory / f"happened-{number}", cluster
        self.event = training.events[number] if number < len(training.events) else None
        self._own = self.event is not None and self.event.worker == told["task"]["index"]
        self._steps = max(0, steps - _LAST_STEPS)
        # Of several workers each may read a part only, and an attempt that resumes reads the rest.
        self._rows = training.input.rows * training.input.epochs // (2 * training.workers)
        self.step = self._rows_read = 0
        if self._own and self.event is not None and self.event.phase == "in save":
            sys.addaudithook(self._audit)

    def at(self, phase: str) -> None:
        """Do it, if this is the phase."""
        if self._is_due(phase):
            self._happen()

    def soon(self) -> None:
        """Do it from another thread."""
        if self._is_due("in step"):
            assert self.event is not None
            thread = threading.Timer(self.event.seconds, self._happen)
            thread.daemon = True
            thread.start()

    def make_room(self) -> None:
        """Let the disk have room again."""
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    def _audit(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "os.rename" and re.search(r"\.writing-\w+/checkpoint$", str(arguments[0])):
            self.at("in save")

    def _is_due(self, phase: str) -> bool:
        if not self._own or self.event is None or self.event.phase != phase:
            return False
        if phase in ("start", "created", "tracing", "end"):
            return True
        if phase == "input":
            self._rows_read += 1
            return self._rows_read > self.event.at * self._rows and self.step <= self._steps
        return int(self.event.at * self._steps) <= self.step <= self._steps

    def _happen(self) -> None:
        assert self.event is not None
        event, self._own = self.event, False
        # Whole, or not there: a worker of the next attempt may look at any time.
        unfinished = self._note.with_name(f".{self._note.name}")
        unfinished.write_text(self._cluster)
        unfinished.rename(self._note)
        print(f"happens at step {self.step}: {event}", flush=True)
        if event.launcher:
            self._happen_to_launcher(event)
        elif event.kind == "raise":
            raise ArithmeticError("chaos")
        elif event.kind == "sys.exit":
            sys.exit(event.code)
        elif event.kind == "os._exit":
            os._exit(event.code)
        elif event.kind == "slow":
            time.sleep(event.seconds)
        elif event.kind == "full disk":
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (event.free_bytes, hard))
        else:
            os.kill(os.getpid(), getattr(signal, event.kind))

    def _happen_to_launcher(self, event: Event) -> None:
        launcher = os.getppid()
        if event.kind == "pause":
            os.kill(launcher, signal.SIGSTOP)
            time.sleep(event.seconds)
            os.kill(launcher, signal.SIGCONT)
        else:
            os.kill(launcher, getattr(signal, event.kind))


def data(strategy: rx.Strategy, given: Input, happening: Happening) -> Any:
    """Return an iterator over numbered rows."""
    random = np.random.default_rng(0)
    numbers, rows = np.arange(given.rows), random.normal(size=(given.rows, 3)).astype(np.float32)

    def read(row: Any) -> Any:
        happening.at("input")
        return row

    def pipeline(chosen: slice) -> Any:
        slices = rx.from_tensor_slices((numbers[chosen], rows[chosen])).map(read)
        return slices.shuffle(seed=1).batch(given.batch).repeat(given.epochs)

    if given.policy == "function":
        return iter(
            strategy.distribute_datasets_from_function(
                lambda context: pipeline(
                    slice(context.input_pipeline_id, None, context.num_input_pipelines)
                )
            )
        )
    return iter(
        strategy.experimental_distribute_dataset(
            pipeline(slice(None)), rx.InputOptions(auto_shard_policy=given.policy)
        )
    )


def main(directory: Path, training: Training, steps: int) -> None:
    (directory / "processes" / str(os.getpid())).touch()
    happening = Happening(directory, training, steps)
    rx.preemption.requested()  # from here on SIGTERM is handled
    happening.at("start")
    strategy = rx.MultiWorkerMirroredStrategy(
        communication_options=rx.experimental.CommunicationOptions(timeout_seconds=TIMEOUT_SECONDS)
    )
    with strategy.scope():
        weights = rx.Variable(np.float32([0.1, -0.2, 0.3]), name="weights")
        seen = rx.Variable(
            np.zeros(training.input.rows, np.int32), synchronization="ON_READ", aggregation="SUM"
        )
        optimizer = rx.Optimizer(optax.adam(0.05))
    happening.at("created")

    @rx.function
    def train_step(batch):
        happening.at("tracing")

        def replica(numbers, rows):
            loss = lambda: jnp.sum(jnp.tanh(rows @ weights - 1.0) ** 2)  # noqa: E731
            (gradient,) = rx.grad(loss, [weights])()
            optimizer.apply_gradients([(gradient, weights)])
            seen.assign_add(jnp.zeros(training.input.rows, jnp.int32).at[numbers].add(1))

        strategy.run(replica, args=batch)

    iterator = data(strategy, training.input, happening)
    checkpoint = rx.Checkpoint(weights=weights, seen=seen, optimizer=optimizer, data=iterator)
    manager = rx.CheckpointManager(
        checkpoint,
        directory / "checkpoints",
        max_to_keep=training.max_to_keep,
        asynchronous=training.asynchronous,
    )

    def save(wait: bool = False) -> None:
        try:
            manager.save()
            if wait:
                manager.sync()
        except rx.errors.SaveFailed as error:
            if happening.event is None or not happening.event.recovers:
                raise
            print(f"goes on after SaveFailed: {error}", flush=True)
            happening.make_room()
            manager.save()
            manager.sync()

    path = manager.restore_or_initialize()
    happening.step = int(optimizer.iterations)
    print(f"begins at step {happening.step}, {path and Path(path).name}", flush=True)
    for batch in iterator:
        happening.at("step")
        happening.soon()
        train_step(batch)
        happening.step += 1
        time.sleep(0.02)  # so that workers can agree on a stop before the last step
        if rx.preemption.requested():
            save(wait=True)
            print(f"stopped after step {happening.step}", flush=True)
            sys.exit(143)
        if happening.step % training.interval == 0:
            happening.at("before save")
            save()
            happening.at("after save")
    save(wait=True)
    print(f"steps {happening.step}", flush=True)
    print(f"weights {weights.numpy().tobytes().hex()}", flush=True)
    print(f"seen {sorted(set(seen.numpy().tolist()))}", flush=True)
    happening.at("end")


if __name__ == "__main__":
    main(Path(sys.argv[1]), training_from_json(sys.argv[2]), int(sys.argv[3]))
