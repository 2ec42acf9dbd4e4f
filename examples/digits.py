"""Trains a classifier of handwritten digits on several devices at once.

    make demo                                  # or, in an environment with replicax[demo]:
    python examples/digits.py --replicas 4

The data is real (1,797 scanned digits, part of scikit-learn) and the devices are virtual: the host
CPU, split. With GPUs, leave out the device names in `rx.MirroredStrategy(...)`; nothing else
changes.
"""

from __future__ import annotations

import click
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

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


@click.command()
@click.option("--replicas", default=4, show_default=True, help="How many virtual devices to use.")
@click.option("--epochs", default=30, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(replicas: int, epochs: int, seed: int) -> None:
    """Trains, shows how it goes, and says what ran where."""
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    console = Console()
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, random_state=seed, stratify=labels
    )

    with strategy.scope():
        model = Classifier(seed)
        accuracy = Accuracy()
        optimizer = rx.Optimizer(optax.adam(3e-3))

    def share(rows: np.ndarray) -> rx.PerReplica:
        """Divides the rows of a global batch over the replicas."""
        shares = np.array_split(rows, replicas)
        return strategy.experimental_distribute_values_from_function(
            lambda context: shares[context.replica_id_in_sync_group]
        )

    def replica_step(images: jax.Array, labels: jax.Array, rows: int) -> jax.Array:
        """What one replica does with its share; `rows` is the size of the global batch."""

        def loss_fn() -> tuple[jax.Array, jax.Array]:
            logits = model(images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.sum(losses) / rows, logits

        (loss, logits), gradients = rx.value_and_grad(loss_fn, model.variables, has_aux=True)()
        optimizer.apply_gradients(zip(gradients, model.variables, strict=True))
        accuracy.update(logits, labels)
        return loss

    @rx.function  # one program for all replicas; without this line it runs as ordinary Python
    def train_step(images: rx.PerReplica, labels: rx.PerReplica, rows: int) -> jax.Array:
        losses = strategy.run(replica_step, args=(images, labels, rows))
        return strategy.reduce("SUM", losses, axis=None)

    @rx.function
    def test_step(images: rx.PerReplica, labels: rx.PerReplica) -> None:
        strategy.run(lambda x, y: accuracy.update(model(x), y), args=(images, labels))

    console.print(f"Training on {len(train_images)} digits with {strategy!r}.")
    order = np.random.default_rng(seed)
    steps = -(-len(train_images) // GLOBAL_BATCH)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=epochs * steps)
        for epoch in range(1, epochs + 1):
            rows = order.permutation(len(train_images))
            losses = []
            for batch in np.split(rows, range(GLOBAL_BATCH, len(rows), GLOBAL_BATCH)):
                inputs = share(train_images[batch]), share(train_labels[batch])
                losses.append(float(train_step(*inputs, len(batch))))
                progress.advance(task)
            progress.update(
                task,
                description=f"epoch {epoch:2d}  loss {np.mean(losses):.3f}  "
                f"accuracy {accuracy.result():.3f}",
            )

    test_step(share(test_images), share(test_labels))
    table = Table(title="What ran where")
    for heading in ("replica", "device", "rows a step"):
        table.add_column(heading, justify="right")
    rows_a_step = [len(part) for part in np.array_split(np.arange(GLOBAL_BATCH), replicas)]
    for replica, device in enumerate(strategy.extended.worker_devices):
        table.add_row(str(replica), str(device), str(rows_a_step[replica]))
    console.print(table)
    console.print(f"Test accuracy on {len(test_images)} unseen digits: {accuracy.result():.3f}")


if __name__ == "__main__":
    main()
