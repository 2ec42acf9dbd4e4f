"""Small Keras models, and the whole life of each: built, fitted, evaluated, asked.

Among them are small versions of the programs on Keras' pages.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
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
SERIES = _numbers.normal(size=(ROWS, 12, 3)).astype(np.float32)
PIXELS = _numbers.integers(0, 3, (ROWS, 6, 6))


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


def timeseries() -> Any:
    return keras.Sequential(
        [
            layers.Conv1D(8, 3, padding="causal", activation="relu"),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def segmentation() -> Any:
    image = keras.Input((6, 6, 1))
    narrow = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(image)
    wide = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(narrow)
    both = layers.Concatenate()([image, wide])
    return keras.Model(image, layers.Conv2D(3, 1, activation="softmax")(both))


def several_inputs() -> Any:
    table, words = keras.Input((5,), name="table"), keras.Input((7,), name="words", dtype="int32")
    read = layers.Flatten()(layers.Embedding(20, 4)(words))
    both = layers.Dense(16, activation="relu")(layers.Concatenate()([table, read]))
    outputs = {
        "label": layers.Dense(3, activation="softmax", name="label")(both),
        "yes": layers.Dense(1, activation="sigmoid", name="yes")(both),
    }
    return keras.Model({"table": table, "words": words}, outputs)


def siamese() -> Any:
    left, right = keras.Input((5,)), keras.Input((5,))
    tower = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(8)])
    apart = keras.ops.sum((tower(left) - tower(right)) ** 2, axis=1, keepdims=True)
    return keras.Model([left, right], keras.ops.sqrt(apart + 1e-3))


def contrastive(same: Any, apart: Any) -> Any:
    near, far = keras.ops.square(apart), keras.ops.square(keras.ops.maximum(1 - apart, 0))
    return keras.ops.mean(same * near + (1 - same) * far)


def bags() -> Any:
    """Make a model of several instances with one label; attention weighs them."""
    instances = [keras.Input((5,)) for _ in range(3)]
    embedding, score = layers.Dense(8, activation="relu"), layers.Dense(1, use_bias=False)
    embedded = [embedding(each) for each in instances]
    weights = layers.Softmax()(layers.Concatenate()([score(each) for each in embedded]))
    pooled = sum(each * weights[:, i : i + 1] for i, each in enumerate(embedded))
    return keras.Model(instances, layers.Dense(3, activation="softmax")(pooled))


def augmentation() -> Any:
    """Make a model with layers that Keras does not compile, on any backend."""
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.RandomRotation(0.1, seed=1),
            layers.RandomZoom(0.1, seed=2),
            layers.RandomPerspective(0.5, scale=0.1, seed=3),
            layers.Flatten(),
            layers.Dense(3, activation="softmax"),
        ]
    )


class Quantizer(layers.Layer):
    """The nearest vector of a codebook; gradients pass straight through."""

    def build(self, shape: Any) -> None:
        self.codes = self.add_weight(shape=(6, shape[-1]), initializer="random_normal")

    def call(self, x: Any) -> Any:
        distances = keras.ops.sum((x[:, None] - self.codes[None]) ** 2, axis=-1)
        chosen = keras.ops.take(self.codes, keras.ops.argmin(distances, axis=-1), axis=0)
        stopped = keras.ops.stop_gradient
        self.add_loss(keras.ops.mean((stopped(chosen) - x) ** 2))
        self.add_loss(keras.ops.mean((chosen - stopped(x)) ** 2))
        return x + stopped(chosen - x)


def vq_vae() -> Any:
    return keras.Sequential([layers.Dense(8, activation="relu"), Quantizer(), layers.Dense(5)])


class Distiller(keras.Model):
    """A student that learns from a teacher, and from the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = dense(), dense()
        for each in (self.teacher, self.student):
            each.build((None, 5))
        self.teacher.trainable = False

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True) -> Any:
        own = super().compute_loss(x, y, y_pred, sample_weight, training)
        if not training:
            return own
        taught = keras.losses.kl_divergence(self.teacher(x, training=False), y_pred)
        return 0.3 * own + 0.7 * keras.ops.mean(taught)


class Autoencoder(keras.Model):
    """A variational autoencoder; `train_step` is left open."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(4)])
        self.decoder = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(5)])
        self.encoder.build((None, 5))
        self.decoder.build((None, 2))
        self.seeds = keras.random.SeedGenerator(3)
        self.total = keras.metrics.Mean(name="total")

    @property
    def metrics(self) -> list[Any]:
        return [self.total]

    def call(self, x: Any) -> Any:
        mean, deviation = keras.ops.split(self.encoder(x), 2, axis=1)
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.seeds)
        divergence = keras.ops.exp(deviation) + mean**2 - 1 - deviation
        return self.decoder(mean + keras.ops.exp(deviation / 2) * noise), divergence

    def loss_of(self, x: Any, outputs: Any) -> Any:
        return keras.ops.mean((outputs[0] - x) ** 2) + 0.1 * keras.ops.mean(outputs[1])


class StatelessAutoencoder(Autoencoder):
    """An autoencoder with the step that Keras has for JAX."""

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, other, slots, metrics = state

        def loss(trainable: Any, other: Any) -> Any:
            outputs, other = self.stateless_call(trainable, other, data)
            return self.loss_of(data, outputs), other

        (value, other), gradients = jax.value_and_grad(loss, has_aux=True)(trainable, other)
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        metrics = self.total.stateless_update_state(metrics, value)
        logs = {"total": self.total.stateless_result(metrics)}
        return logs, (trainable, other, slots, metrics)

    def test_step(self, state: Any, data: Any) -> Any:
        trainable, other, metrics = state
        outputs, other = self.stateless_call(trainable, other, data)
        metrics = self.total.stateless_update_state(metrics, self.loss_of(data, outputs))
        return {"total": self.total.stateless_result(metrics)}, (trainable, other, metrics)


class StatefulAutoencoder(Autoencoder):
    """An autoencoder with steps as for TensorFlow, but with `rx.value_and_grad`, not a tape."""

    def train_step(self, data: Any) -> Any:
        value, gradients = rx.value_and_grad(
            lambda: self.loss_of(data, self(data)), self.trainable_variables
        )()
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.total.update_state(value)
        return {"total": self.total.result()}

    def test_step(self, data: Any) -> Any:
        self.total.update_state(self.loss_of(data, self(data)))
        return {"total": self.total.result()}


class Adversaries(keras.Model):
    """A GAN as on the reference's pages: two optimizers, and nothing to call."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = keras.Sequential(
            [keras.Input((5,)), layers.Dense(16, activation="relu"), layers.Dense(1)]
        )
        self.forger = keras.Sequential(
            [keras.Input((3,)), layers.Dense(16, activation="relu"), layers.Dense(5)]
        )
        self.seeds = keras.random.SeedGenerator(3)
        self.means = [keras.metrics.Mean(name=name) for name in ("judge_loss", "forger_loss")]

    def compile(self, optimizer: Any, loss: Any, **kwargs: Any) -> None:
        super().compile(optimizer)
        self.loss_of, self.forger_optimizer = loss, keras.optimizers.Adam(0.01)

    @property
    def metrics(self) -> list[Any]:
        return self.means

    def train_step(self, data: Any) -> Any:
        rows = data.shape[0]
        forged = self.forger(keras.random.normal((rows, 3), seed=self.seeds))
        both, true = jnp.concatenate([forged, data]), jnp.repeat(jnp.float32([[1], [0]]), rows, 0)
        judge, forger = self.judge.trainable_variables, self.forger.trainable_variables
        judged, gradients = rx.value_and_grad(lambda: self.loss_of(true, self.judge(both)), judge)()
        self.optimizer.apply_gradients(zip(gradients, judge, strict=True))
        noise = keras.random.normal((rows, 3), seed=self.seeds)
        fooled, gradients = rx.value_and_grad(
            lambda: self.loss_of(jnp.zeros((rows, 1)), self.judge(self.forger(noise))), forger
        )()
        self.forger_optimizer.apply(gradients, forger)
        for mean, value in zip(self.means, (judged, fooled), strict=True):
            mean.update_state(value)
        return {mean.name: mean.result() for mean in self.means}


@dataclass(frozen=True)
class Case:
    """A model, and what it is compiled and fitted with."""

    model: Callable[[], Any]
    x: Any
    y: Any = field(default_factory=lambda: LABELS)
    metrics: Callable[[], Any] = lambda: ["accuracy"]
    loss: Any = "sparse_categorical_crossentropy"
    optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(0.01)
    policy: str = "float32"
    rows: int = 20  # so that every batch is full, and there is less to compile
    compile: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list
    evaluates: bool = True
    predicts: bool = False
    by_hand: bool = False  # because plain Keras has no such step on JAX
    like: str | None = None  # another case, whose results are the same
    # Shapes begin with this in a program in which every device computes the whole batch.
    whole: str | None = str(BATCH)


CASES = {
    "dense": Case(dense, TABLE, predicts=True),
    "a partial batch": Case(dense, TABLE, rows=ROWS, predicts=True),
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
    "without jit_compile": Case(
        dense, TABLE, compile={"jit_compile": False}, fit={"epochs": 1}, whole=None
    ),
    "mixed precision": Case(dense, TABLE, policy="mixed_bfloat16"),
    "several steps at once": Case(dense, TABLE, compile={"steps_per_execution": 4}, predicts=True),
    "accumulated gradients": Case(
        dense,
        TABLE,
        optimizer=lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    ),
    "timeseries": Case(
        timeseries,
        SERIES,
        TABLE[:, :1],
        metrics=lambda: ["mae"],
        loss="mse",
        fit={"epochs": 4, "validation_split": 0.5},
        callbacks=lambda: [
            keras.callbacks.ReduceLROnPlateau(monitor="val_loss", min_delta=1.0, patience=0),
            keras.callbacks.EarlyStopping(
                monitor="val_loss", min_delta=1.0, patience=2, restore_best_weights=True
            ),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(n=epoch)),
        ],
    ),
    "segmentation": Case(segmentation, IMAGES, PIXELS),
    "several inputs": Case(
        several_inputs,
        {"table": TABLE, "words": WORDS},
        {"label": LABELS, "yes": BINARY},
        metrics=lambda: {"label": "accuracy", "yes": "mae"},
        loss={"label": "sparse_categorical_crossentropy", "yes": "binary_crossentropy"},
        compile={"loss_weights": {"label": 1.0, "yes": 0.5}},
    ),
    "siamese": Case(siamese, [TABLE, TABLE[::-1].copy()], BINARY, list, contrastive),
    "multiple instances": Case(
        bags,
        [TABLE, TABLE + 1, TABLE - 1],
        rows=3,
        fit={"batch_size": 1, "class_weight": {0: 0.5, 1: 2.0, 2: 1.0}},
        whole=None,  # a batch has one row, and cannot be divided
    ),
    "augmentation": Case(augmentation, IMAGES, fit={"epochs": 1}),
    "VQ-VAE": Case(vq_vae, TABLE, TABLE, list, "mse"),
    "distillation": Case(Distiller, TABLE),
    "VAE": Case(StatelessAutoencoder, TABLE, None, list, None),
    "VAE, stateful": Case(StatefulAutoencoder, TABLE, None, list, None, like="VAE"),
    "VAE, stateful, a partial batch": Case(
        StatefulAutoencoder,
        TABLE,
        None,
        list,
        None,
        rows=ROWS,
        fit={"shuffle": False},
        by_hand=True,
    ),
    "GAN": Case(
        Adversaries,
        TABLE,
        None,
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        evaluates=False,
        fit={"shuffle": False},
        by_hand=True,
        # XLA gathers the rows that are judged, as many as are forged, and divides the layers.
        whole=f"{2 * BATCH},16",
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
    """Return the results of a model; without a strategy, those of plain Keras."""
    keras.utils.set_random_seed(5)
    with policy(case.policy), strategy.scope() if strategy else contextlib.nullcontext():
        model = case.model()
    model.compile(case.optimizer(), case.loss, metrics=case.metrics(), **case.compile)
    fit = {"batch_size": BATCH, "epochs": 2, "verbose": 0, **case.fit}
    x, y, fit = jax.tree.map(
        lambda leaf: leaf[: case.rows] if isinstance(leaf, np.ndarray) else leaf,
        (case.x, case.y, fit),
    )
    if case.by_hand and strategy is None:
        history, evaluated = _by_hand(model, x, fit, case.evaluates)
    else:
        history = model.fit(x, y, callbacks=case.callbacks(), **fit).history
        evaluated = case.evaluates and model.evaluate(x, y, batch_size=fit["batch_size"], verbose=0)
    results = {f"history: {name}": np.array(v) for name, v in history.items()}
    results["evaluate"] = np.array(evaluated)
    if case.predicts:
        results["predict"] = model.predict(x, batch_size=BATCH, verbose=0)
    for number, weight in enumerate((*model.weights, *model.optimizer.variables)):
        results[f"weight {number}"] = np.asarray(weight.value)
    return results


def _by_hand(model: Any, x: np.ndarray, fit: dict[str, Any], evaluates: bool) -> Any:
    """Run `fit` and `evaluate` as a loop, by steps that change the model, on one device."""
    batches = [x[start : start + BATCH] for start in range(0, len(x), BATCH)]

    def epoch(step: Callable[[Any], Any]) -> Any:
        model.reset_metrics()
        return [step(batch) for batch in batches][-1]

    model.optimizer.build(model.trainable_variables)
    logs = [epoch(model.train_step) for _ in range(fit["epochs"])]
    history = {name: [float(each[name]) for each in logs] for name in logs[0]}
    return history, evaluates and next(iter(epoch(model.test_step).values()))


@functools.cache
def plain(name: str) -> dict[str, np.ndarray]:
    """Return the results of Keras on one device."""
    return life(CASES[CASES[name].like or name], None)
