"""Trains a Keras model of handwritten digits with `fit`, on several devices.

    replicax launch --workers 2 examples/keras_digits.py
    python examples/keras_digits.py --replicas 4    # one process with four devices

In an environment with replicax[keras,demo]. The model is made in the strategy's scope; everything
after that is plain Keras. It is killed and started again without losing more than a step, if it is
told where to keep its backup.
"""

# Keras has no types, and type checkers guess wrong ones, such as `str` for `verbose`.
# pyright: reportArgumentType=false

from __future__ import annotations

import os
from typing import cast

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported

import click
import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.utils import Bunch

import replicax as rx

GLOBAL_BATCH = 64


def classifier() -> keras.Model:
    """Return a small convolutional network."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """1,797 scanned digits of 8 by 8 pixels: those to learn from, and those to be tested with."""
    digits = cast(Bunch, load_digits())
    images = (digits.images[..., None] / 16).astype(np.float32)
    parts = train_test_split(
        images, digits.target, test_size=0.2, random_state=0, stratify=digits.target
    )
    learn, test, learn_labels, test_labels = map(np.asarray, parts)
    return (learn, learn_labels), (test, test_labels)


@click.command()
@click.option("--replicas", type=int, help="Use so many virtual devices of this process alone.")
@click.option("--epochs", default=10, show_default=True)
@click.option("--backup", help="A directory that all workers see, to go on from after a kill.")
def main(replicas: int | None, epochs: int, backup: str | None) -> None:
    """Trains on some replicas, and tells how well that went."""
    keras.utils.set_random_seed(1)
    if replicas is None:  # what the launcher, or TF_CONFIG, says
        strategy = rx.MultiWorkerMirroredStrategy()
    else:
        strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    with strategy.scope():
        model = classifier()
    learning, testing = data()
    callbacks = [rx.BackupAndRestore(backup, save_freq=5)] if backup else []
    model.fit(
        *learning,
        batch_size=GLOBAL_BATCH,
        epochs=epochs,
        callbacks=callbacks,
        verbose=2 if rx.is_first_worker() else 0,
    )
    _, accuracy = model.evaluate(*testing, batch_size=GLOBAL_BATCH, verbose=0)
    rx.print(
        f"Test accuracy on {len(testing[0])} unseen digits: {accuracy:.3f} "
        f"({strategy.num_replicas_in_sync} replicas)"
    )


if __name__ == "__main__":
    main()
