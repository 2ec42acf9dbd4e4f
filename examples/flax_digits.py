"""Trains a convolutional network of Flax NNX on handwritten digits, on several devices.

    pip install 'replicax[flax,demo]'
    python examples/flax_digits.py --replicas 4
    replicax launch --workers 2 --devices-per-worker 2 examples/flax_digits.py

The model, the optimizer and the metrics are plain NNX, and so is the step: it is written for one
device, and given to `run` together with them. What is different from one device is the loss, which
every replica divides by the size of the whole batch, because gradients are summed.
"""

from __future__ import annotations

from typing import cast

import click
import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.utils import Bunch

import replicax as rx

GLOBAL_BATCH = 120


class Network(nnx.Module):
    """Two convolutions, each with batch normalisation, then dropout and a dense layer."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        # No biases: batch normalisation takes away the mean.
        self.conv1 = nnx.Conv(1, 16, kernel_size=(3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, kernel_size=(3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.dense = nnx.Linear(2 * 2 * 32, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.max_pool(nnx.relu(self.norm1(self.conv1(images))), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), strides=(2, 2))
        return self.dense(self.dropout(x.reshape(len(x), -1)))


def replica_step(
    model: Network,
    optimizer: nnx.Optimizer,
    metrics: nnx.MultiMetric,
    images: jax.Array,
    labels: jax.Array,
) -> None:
    """Train on one replica's share of a batch."""

    def loss_fn(model: Network) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        logits = model(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.sum() / GLOBAL_BATCH, (losses, logits)

    (_, (losses, logits)), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)  # of all replicas
    metrics.update(logits=logits, labels=labels, values=losses)


def replica_test(
    model: Network, metrics: nnx.MultiMetric, images: jax.Array, labels: jax.Array
) -> None:
    """Do the same without training."""
    logits = model(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    metrics.update(logits=logits, labels=labels, values=losses)


@click.command()
@click.option("--replicas", type=int, help="Use so many virtual devices of this process alone.")
@click.option("--epochs", default=10, show_default=True)
@click.option("--seed", default=0, show_default=True)
def main(replicas: int | None, epochs: int, seed: int) -> None:
    """Trains, then tests."""
    if replicas is None:  # what the launcher, or TF_CONFIG, says
        strategy = rx.MultiWorkerMirroredStrategy()
    else:
        strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    digits = cast(Bunch, load_digits())
    images = (digits.images[..., None] / 16).astype(np.float32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images,
        digits.target.astype(np.int32),
        test_size=0.2,
        random_state=seed,
        stratify=digits.target,
    )
    # Every worker reads all of it, and takes its rows: there is little to read.
    by_rows = rx.InputOptions(auto_shard_policy=rx.AutoShardPolicy.DATA)
    training, testing = (
        strategy.experimental_distribute_dataset(
            rows.batch(GLOBAL_BATCH, drop_remainder=True).repeat(times), by_rows
        )
        for rows, times in (
            (rx.from_tensor_slices((train_images, train_labels)).shuffle(seed=seed), epochs),
            (rx.from_tensor_slices((test_images, test_labels)), 1),
        )
    )

    with strategy.scope():
        model = Network(rngs=nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average())
    train_step, test_step = rx.function(replica_step), rx.function(replica_test)

    steps_an_epoch = len(training) // epochs
    for step, batch in enumerate(training, start=1):
        strategy.run(train_step, args=(model, optimizer, metrics, *batch))
        if step % steps_an_epoch == 0:
            seen = {name: float(value) for name, value in metrics.compute().items()}
            rx.print(
                f"epoch {step // steps_an_epoch:2d}  loss {seen['loss']:.3f}  "
                f"accuracy {seen['accuracy']:.3f}"
            )
            metrics.reset()

    model.eval()
    metrics.reset()
    for batch in testing:
        strategy.run(test_step, args=(model, metrics, *batch))
    accuracy = float(metrics.compute()["accuracy"])
    rx.print(f"Test accuracy on {len(test_images)} unseen digits: {accuracy:.3f}")


if __name__ == "__main__":
    main()
