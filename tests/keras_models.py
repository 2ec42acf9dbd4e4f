"""Small Keras models, and a whole life of each: built, fitted, evaluated, asked."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import replicax as rx

keras = pytest.importorskip("keras", reason="Keras is not installed: pip install replicax[keras]")
layers = keras.layers

ROWS, BATCH = 23, 10  # the last batch is partial, and 10 rows do not divide by 3 or 8 replicas
_numbers = np.random.default_rng(0)
IMAGES = _numbers.normal(size=(ROWS, 6, 6, 1)).astype(np.float32)
WORDS = _numbers.integers(0, 20, (ROWS, 7))
TABLE = _numbers.normal(size=(ROWS, 5)).astype(np.float32)
LABELS = _numbers.integers(0, 3, ROWS)
BINARY = _numbers.integers(0, 2, (ROWS, 1)).astype(np.float32)
WEIGHTS = _numbers.uniform(0.1, 2, ROWS).astype(np.float32)


def dense() -> Any:
    return keras.Sequential(
        [layers.Dense(8, activation="relu"), layers.Dense(3, activation="softmax")]
    )


def binary() -> Any:
    return keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1, "sigmoid")])


def convolution() -> Any:
    image = keras.Input((6, 6, 1))
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, activation="relu")(image))
    return keras.Model(image, layers.Dense(3, activation="softmax")(layers.Flatten()(x)))


def dropout() -> Any:
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, activation="relu"),
            layers.Dropout(0.4, seed=7),
            layers.Dense(3, activation="softmax"),
        ]
    )


def recurrent() -> Any:
    return keras.Sequential(
        [layers.Embedding(20, 4), layers.LSTM(5), layers.Dense(3, activation="softmax")]
    )


def attention() -> Any:
    words = keras.Input((7,), dtype="int32")
    x = layers.Embedding(20, 4)(words)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 2)(x, x))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(words, layers.Dense(3, activation="softmax")(x))


@dataclass(frozen=True)
class Case:
    """A model, what it is compiled and fitted with."""

    model: Callable[[], Any]
    x: Any
    y: Any = field(default_factory=lambda: LABELS)
    metrics: Callable[[], list[Any]] = lambda: ["accuracy"]
    loss: str = "sparse_categorical_crossentropy"
    optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.01)
    policy: str = "float32"
    rows: int = 20  # so that every batch is full, and there is less to compile
    compile: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list


CASES = {
    "dense": Case(dense, TABLE),
    "a partial batch": Case(dense, TABLE, rows=ROWS),
    "top k": Case(
        dense, TABLE, metrics=lambda: [keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")]
    ),
    "AUC, sample weights": Case(
        binary,
        TABLE,
        BINARY,
        metrics=lambda: [keras.metrics.AUC(name="auc"), "accuracy"],
        loss="binary_crossentropy",
        fit={"sample_weight": WEIGHTS},
    ),
    "class weights": Case(dense, TABLE, fit={"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}),
    "convolution": Case(convolution, IMAGES, optimizer=lambda: keras.optimizers.SGD(0.1, 0.9)),
    "dropout": Case(dropout, TABLE),
    "recurrent": Case(recurrent, WORDS),
    "attention": Case(attention, WORDS),
    "without jit_compile": Case(dense, TABLE, compile={"jit_compile": False}, fit={"epochs": 1}),
    "mixed precision": Case(dense, TABLE, policy="mixed_bfloat16"),
    "several steps at once": Case(dense, TABLE, compile={"steps_per_execution": 4}),
    "callbacks": Case(
        dense,
        TABLE,
        fit={"epochs": 4, "validation_split": 0.2},
        callbacks=lambda: [
            keras.callbacks.ReduceLROnPlateau(monitor="loss", min_delta=1.0, patience=0),
            keras.callbacks.EarlyStopping(monitor="loss", min_delta=1.0, patience=2),
        ],
    ),
    "accumulated gradients": Case(
        dense,
        TABLE,
        optimizer=lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    ),
}


@contextlib.contextmanager
def policy(name: str):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def life(case: Case, strategy: rx.Strategy | None) -> dict[str, np.ndarray]:
    """What comes out of a model; without a strategy, of plain Keras."""
    keras.utils.set_random_seed(5)
    with policy(case.policy), strategy.scope() if strategy else contextlib.nullcontext():
        model = case.model()
    model.compile(case.optimizer(), case.loss, metrics=case.metrics(), **case.compile)
    fit = {"batch_size": BATCH, "epochs": 2, "verbose": 0, **case.fit}
    fit = {k: v[: case.rows] if isinstance(v, np.ndarray) else v for k, v in fit.items()}
    x, y = case.x[: case.rows], case.y[: case.rows]
    history = model.fit(x, y, callbacks=case.callbacks(), **fit)
    results = {f"history: {name}": np.array(v) for name, v in history.history.items()}
    results["evaluate"] = np.array(model.evaluate(x, y, batch_size=BATCH, verbose=0))
    if case.model is dense:
        results["predict"] = model.predict(x, batch_size=BATCH, verbose=0)
    for number, weight in enumerate((*model.weights, *model.optimizer.variables)):
        results[f"weight {number}"] = np.asarray(weight.value)
    return results


@functools.cache
def plain(name: str) -> dict[str, np.ndarray]:
    """The same of Keras on one device."""
    return life(CASES[name], None)
