"""The shared part of contestants that call `fit`: the same Keras model, on the same arrays.

It is imported once KERAS_BACKEND is set, in the environment of that backend.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Mapping

import keras
import numpy as np
from _batches import arrays_of
from _problem import CLASSES, EPOCH_ROWS, FEATURES, Cell, problem_of
from _protocol import serve


def serve_fit(make_model: Callable[[Cell], keras.Model], versions: Mapping[str, str]) -> None:
    """Serve epochs of one `fit`: to the protocol, a whole epoch is one step."""

    def build(cell: Cell) -> Callable[[], float]:
        told = EpochsWhenTold()

        # All of it runs in one thread, because Keras has one distribution per thread.
        def fit() -> None:
            model = make_model(cell)
            rows, _ = arrays_of(cell, EPOCH_ROWS // cell.global_batch)
            # The labels can be learned: otherwise the losses of the contestants would not agree.
            labels = rows[:, :CLASSES].argmax(axis=1).astype(np.int32)
            model.fit(
                rows,
                labels,
                batch_size=cell.global_batch,
                epochs=sys.maxsize,
                shuffle=False,  # or contestants would see different batches
                verbose=0,
                callbacks=[told],
            )

        threading.Thread(target=fit, daemon=True).start()
        return told.epoch

    serve(build, {**versions, "keras": keras.__version__}, warmup_steps=1)


class EpochsWhenTold(keras.callbacks.Callback):
    """A callback that lets `fit`, in another thread, begin an epoch when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self._begin: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._losses: queue.SimpleQueue[float] = queue.SimpleQueue()

    def epoch(self) -> float:
        """Run the next epoch, and return the mean loss of its steps."""
        self._begin.put(None)
        return self._losses.get()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        self._begin.get()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        assert logs is not None
        self._losses.put(logs["loss"])


def model_of(cell: Cell) -> keras.Model:
    """Make the model; this must be called in the scope of what distributes it."""
    problem = problem_of(cell)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(cell.hidden, activation="relu"),
            keras.layers.Dense(cell.hidden, activation="relu"),
            keras.layers.Dense(CLASSES),
        ]
    )
    layers = zip(problem.weights, problem.biases, strict=True)
    model.set_weights([array for layer in layers for array in layer])
    model.compile(
        optimizer=keras.optimizers.SGD(cell.learning_rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
