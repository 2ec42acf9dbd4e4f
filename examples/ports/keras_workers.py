"""The tutorial "Multi-worker training with Keras" as a replicax program.

    replicax launch --workers 2 examples/ports/keras_workers.py
    replicax launch --workers 2 --max-restarts 1 examples/ports/keras_workers.py --kill-at 100

In an environment with replicax[keras,demo]. Workers that learn of each other by TF_CONFIG, which
the launcher sets, train a convolutional network by `fit`, and save it, each to a path of its own;
the chief's is kept. With `--kill-at` worker 1 kills itself after that step, once; started again,
all resume there. docs/ports/keras_workers.md has it beside the TensorFlow program.
"""

# Keras has no types, and type checkers guess wrong ones, such as `str` for `verbose`.
# pyright: reportArgumentType=false

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported

import click
import jax
import keras
from starting_point import Rows, digits, initial_weights, record

import replicax as rx

GLOBAL_BATCH = 64
STEPS_PER_EPOCH = 22
LAYERS = {"convolution": (3, 3, 1, 16), "hidden": (256, 64), "output": (64, 10)}


def network() -> keras.Model:
    """Return a compiled model, with the weights that both programs begin with."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.set_weights(list(initial_weights(LAYERS).values()))
    return model


class KillOnce(keras.callbacks.Callback):
    """A callback that kills its process in some step, unless it has done so before."""

    def __init__(self, step: int, mark: Path) -> None:
        super().__init__()
        self._step, self._mark = step, mark

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        assert self.model is not None
        if int(self.model.optimizer.iterations) == self._step and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def save(model: keras.Model, directory: Path, strategy: rx.MultiWorkerMirroredStrategy) -> Path:
    """Save on every worker, and keep what the chief has written.

    Saving may need all workers, as reading some variables does; so all call it, each with a path of
    its own, lest two write to one file.
    """
    chief = rx.is_first_worker()
    mine = directory if chief else directory / f"worker_{strategy.cluster_resolver.task_id}"
    mine.mkdir(parents=True, exist_ok=True)
    model.save(mine / "digits.keras")
    with rx.CheckpointManager(rx.Checkpoint(model=model), mine / "checkpoints", 1) as manager:
        manager.save()
    if not chief:
        shutil.rmtree(mine)
    return directory / "digits.keras"


def test_accuracy(model: keras.Model, test: Rows) -> float:
    """Return how often the model is right."""
    return model.evaluate(*test, batch_size=GLOBAL_BATCH, verbose=0, return_dict=True)["accuracy"]


@click.command()
@click.option("--epochs", default=10, show_default=True)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    default=Path(tempfile.gettempdir()) / "replicax_keras_workers",
    show_default=True,
    help="Where to save; all workers must see it.",
)
@click.option("--kill-at", type=int, help="Worker 1 kills itself after this step, once.")
@click.option("--losses", "path", help="A file to write the losses of all epochs to, as JSON.")
def main(epochs: int, directory: Path, kill_at: int | None, path: str | None) -> None:
    """Train, save, and load what was saved."""
    strategy = rx.MultiWorkerMirroredStrategy()  # reads TF_CONFIG, and waits for the others
    resolver = strategy.cluster_resolver
    print(f"Worker {resolver.task_id or 0}, one of {strategy.num_replicas_in_sync} replicas.")

    learn, test = digits()
    by_rows = rx.InputOptions(auto_shard_policy=rx.AutoShardPolicy.DATA)
    dataset = strategy.experimental_distribute_dataset(
        rx.from_tensor_slices(learn).repeat().batch(GLOBAL_BATCH), by_rows
    )
    with strategy.scope():
        model = network()

    callbacks = [rx.BackupAndRestore(directory / "backup", save_freq=10)]
    if kill_at is not None and resolver.task_id == 1:
        callbacks.append(KillOnce(kill_at, directory / "killed"))
    history = model.fit(
        dataset,
        epochs=epochs,
        steps_per_epoch=STEPS_PER_EPOCH,
        callbacks=callbacks,
        verbose=2 if rx.is_first_worker() else 0,
    ).history

    saved = save(model, directory, strategy)
    accuracy = test_accuracy(model, test)
    rx.print(f"Test accuracy on {len(test[1])} unseen digits: {accuracy:.4f}")
    if rx.is_first_worker():
        loaded = keras.saving.load_model(saved)  # outside of the scope: plain Keras
        print(f"Loaded from {saved.name}, on one device: {test_accuracy(loaded, test):.4f}")
        if path is not None:
            curves = {"loss": history["loss"], "test_accuracy": [accuracy]}
            made_by = f"replicax {rx.__version__}, JAX {jax.__version__}, Keras {keras.__version__}"
            record(path, made_by, curves)


if __name__ == "__main__":
    main()
