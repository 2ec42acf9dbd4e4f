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
from _keras_models import known_model_of
from _models import EPSILON, MODELS
from _problem import CLASSES, EPOCH_ROWS, FEATURES, AnyCell, Cell, ModelCell, problem_of
from _protocol import serve


def serve_fit(make_model: Callable[[AnyCell], keras.Model], versions: Mapping[str, str]) -> None:
    """Serve epochs of one `fit`: to the protocol, a whole epoch is one step.

    The first step is a `fit` of a single batch.
    """

    def build(cell: AnyCell) -> Callable[[], float]:
        told = EpochsWhenTold()
        made = threading.Event()

        # All of it runs in one thread, because Keras has one distribution per thread.
        def fit() -> None:
            model = make_model(cell)
            rows, labels = examples_of(cell)
            made.set()
            told.wait()
            first = model.fit(
                rows[: cell.global_batch],
                labels[: cell.global_batch],
                batch_size=cell.global_batch,
                verbose=0,
            )
            told.answer(first.history["loss"][0])
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
        made.wait()
        return told.epoch

    serve(build, {**versions, "keras": keras.__version__}, warmup_steps=2)


def examples_of(cell: AnyCell) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and the labels of an epoch."""
    if isinstance(cell, ModelCell):
        count = cell.epoch_steps * cell.global_batch
        return MODELS[cell.model].examples(np.random.RandomState(1), count)
    rows, _ = arrays_of(cell, EPOCH_ROWS // cell.global_batch)
    # The labels can be learned: otherwise the losses of the contestants would not agree.
    return rows, rows[:, :CLASSES].argmax(axis=1).astype(np.int32)


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

    def wait(self) -> None:
        self._begin.get()

    def answer(self, loss: float) -> None:
        self._losses.put(loss)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        self.wait()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        assert logs is not None
        self.answer(logs["loss"])


def model_of(cell: AnyCell) -> keras.Model:
    """Make the model; this must be called in the scope of what distributes it."""
    model = known_model_of(cell.model) if isinstance(cell, ModelCell) else mlp_of(cell)
    model.compile(
        optimizer=optimizer_of(cell),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def optimizer_of(cell: AnyCell) -> keras.Optimizer:
    if isinstance(cell, ModelCell):
        return keras.optimizers.Adam(cell.learning_rate, epsilon=EPSILON)
    return keras.optimizers.SGD(cell.learning_rate)


def mlp_of(cell: Cell) -> keras.Model:
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
    return model
