"""Trains a classifier of handwritten digits on several workers with several devices each.

    make demo                                  # or, in an environment with replicax[demo]:
    replicax launch --workers 2 --devices-per-worker 2 examples/digits.py
    python examples/digits.py --replicas 4     # one process with four devices

The data is real (1,797 scanned digits, part of scikit-learn), in a Grain pipeline; the devices are
virtual: the host CPU, split. With GPUs, `rx.MultiWorkerMirroredStrategy()` takes all of them;
nothing else changes.
"""

from __future__ import annotations

from typing import cast

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.utils import Bunch

import replicax as rx

GLOBAL_BATCH = 128
HIDDEN = 64


class Classifier:
    """Two layers, with variables that the current strategy places."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)

        def layer(inputs: int, outputs: int) -> tuple[rx.Variable, rx.Variable]:
            weights = random.normal(size=(inputs, outputs)) * np.sqrt(2 / inputs)
            return rx.Variable(weights, name="weights"), rx.Variable(np.zeros(outputs), name="bias")

        self.hidden, self.output = layer(64, HIDDEN), layer(HIDDEN, 10)
        self.variables = [*self.hidden, *self.output]

    def __call__(self, images: jax.Array) -> jax.Array:
        activations = jnp.maximum(images @ self.hidden[0] + self.hidden[1], 0)
        return activations @ self.output[0] + self.output[1]


class Accuracy:
    """Counts on every replica by itself; the counts are summed when they are read."""

    def __init__(self) -> None:
        self.right = self._counter("right")
        self.seen = self._counter("seen")

    @staticmethod
    def _counter(name: str) -> rx.Variable:
        return rx.Variable(
            0.0,
            name=name,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    def update(self, logits: jax.Array, labels: jax.Array) -> None:
        self.right.assign_add(jnp.sum(jnp.argmax(logits, -1) == labels).astype(jnp.float32))
        self.seen.assign_add(float(len(labels)))

    def result(self) -> float:
        value = float(self.right) / float(self.seen)
        self.right.assign(0.0)
        self.seen.assign(0.0)
        return value


def scaled(batch: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Scale pixels from 0 to 16 to 0 to 1: a step of the pipeline."""
    images, labels = batch
    return (images / 16).astype(np.float32), labels.astype(np.int32)


def bar(done: int, total: int, text: str) -> str:
    """Return a line that is written over and over."""
    width = 30
    filled = width * done // total
    return f"\r{'━' * filled}{'─' * (width - filled)} {done}/{total}  {text}"


@click.command()
@click.option("--replicas", type=int, help="Use so many virtual devices of this process alone.")
@click.option("--epochs", default=30, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(replicas: int | None, epochs: int, seed: int) -> None:
    """Trains, shows how it goes, and says what ran where."""
    if replicas is None:  # what the launcher, or TF_CONFIG, says
        strategy = rx.MultiWorkerMirroredStrategy()
    else:
        strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    console = Console(quiet=not rx.is_first_worker())  # the others would say the same
    digits = cast(Bunch, load_digits())
    train_images, test_images, train_labels, test_labels = train_test_split(
        digits.data, digits.target, test_size=0.2, random_state=seed, stratify=digits.target
    )

    with strategy.scope():
        model = Classifier(seed)
        accuracy = Accuracy()
        optimizer = rx.Optimizer(optax.adam(3e-3))

    def replica_step(images: jax.Array, labels: jax.Array) -> jax.Array:
        """Train on one replica's share of a batch; in the last one it may be empty."""
        rows = rx.get_replica_context().all_reduce("SUM", float(len(labels)))

        def loss_fn() -> tuple[jax.Array, jax.Array]:
            logits = model(images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.sum(losses) / rows, logits

        (loss, logits), gradients = rx.value_and_grad(loss_fn, model.variables, has_aux=True)()
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        accuracy.update(logits, labels)
        return loss

    @rx.function  # one program for all replicas; without this line it runs as ordinary Python
    def train_step(images: rx.PerReplica, labels: rx.PerReplica) -> jax.Array:
        losses = strategy.run(replica_step, args=(images, labels))
        return strategy.reduce("SUM", losses, axis=None)

    @rx.function
    def test_step(images: rx.PerReplica, labels: rx.PerReplica) -> None:
        strategy.run(lambda x, y: accuracy.update(model(x), y), args=(images, labels))

    # Every worker reads all of it, and takes its rows: there is little to read.
    by_rows = rx.InputOptions(auto_shard_policy=rx.AutoShardPolicy.DATA)
    training, testing = (
        strategy.experimental_distribute_dataset(pipeline.map(scaled), by_rows)
        for pipeline in (
            rx.from_tensor_slices((train_images, train_labels))
            .shuffle(seed=seed)
            .batch(GLOBAL_BATCH)
            .repeat(epochs),
            rx.from_tensor_slices((test_images, test_labels)).batch(GLOBAL_BATCH),
        )
    )
    console.print(f"Training on {len(train_images)} digits with {strategy!r}.")
    steps_an_epoch = len(training) // epochs
    losses, told = [], "starting"
    for step, batch in enumerate(training, start=1):
        losses.append(float(train_step(*batch)))
        if step % steps_an_epoch == 0:
            told = f"loss {np.mean(losses):.3f}  accuracy {accuracy.result():.3f}"
            losses.clear()
        epoch = -(-step // steps_an_epoch)
        rx.print(bar(step, len(training), f"epoch {epoch:2d}  {told}"), end="", flush=True)
    rx.print()

    for batch in testing:
        test_step(*batch)
    table = Table(title="What ran where")
    for heading in ("replica", "worker", "device", "rows/step"):
        table.add_column(heading, justify="right")
    devices = [device for (device,) in strategy.topology.devices]
    for replica, rows in enumerate(np.array_split(np.arange(GLOBAL_BATCH), len(devices))):
        worker = devices[replica].process_index
        place = [d for d in devices if d.process_index == worker].index(devices[replica])
        name = f"{devices[replica].platform}:{place}"
        table.add_row(str(replica), str(worker), name, str(len(rows)))
    console.print(table)
    result = accuracy.result()  # by all workers: it adds up what each of them has counted
    console.print(f"Test accuracy on {len(test_images)} unseen digits: {result:.3f}")


if __name__ == "__main__":
    main()
