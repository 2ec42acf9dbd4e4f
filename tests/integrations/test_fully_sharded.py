"""Variables of Keras and Flax NNX, divided over the replicas: the numbers of mirrored ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import cpus, in_parts
from flax_models import nnx, numbers
from keras_models import IMAGES, LABELS, keras, layers

import replicax as rx

STEPS, VOCABULARY, WIDTH, LENGTH = 20, 24, 16, 8
_random = np.random.default_rng(0)
WORDS = _random.integers(0, VOCABULARY, (STEPS, 8, LENGTH + 1))
PICTURES = _random.normal(size=(STEPS, 8, 6, 6, 1)).astype("f")


def mirrored():
    return rx.MirroredStrategy(cpus(4))


def sharded():
    return rx.FullyShardedStrategy(cpus(4), variable_partitioner=in_parts)


class Transformer(nnx.Module):
    """A block of a transformer whose embeddings are its output weights too."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.words = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def loss(self, words):
        x = self.words(words[:, :-1])
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(words[:, :-1]))
        logits = self.words.attend(x + nnx.gelu(self.dense(x)))
        return optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:])


class Convolutional(nnx.Module):
    """A convolution, normalized over the batch of each replica, and a dense layer."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.convolution = nnx.Conv(1, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dense = nnx.Linear(8, 4, rngs=rngs)

    def loss(self, pictures):
        x = nnx.relu(self.norm(self.convolution(pictures))).mean((1, 2))
        return (self.dense(x) - 1) ** 2


def trained(strategy, kind, batches, compiled):
    """Return the losses of an NNX model, and the model with its optimizer."""
    with strategy.scope():
        model = kind()
        clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
        optimizer = nnx.Optimizer(model, clipped, wrt=nnx.Param)

    def step(batch):
        loss, gradients = nnx.value_and_grad(lambda model: model.loss(batch).mean() / 4)(model)
        optimizer.update(model, gradients)
        return loss

    step = rx.function(step) if compiled else step
    losses = [
        float(strategy.reduce("SUM", strategy.run(step, args=(strategy.split(batch),)), axis=None))
        for batch in batches
    ]
    return losses, (model, optimizer)


def require_same(ours, theirs, ulps):
    """Compare arrays, in units of the last place of the largest number of each, or of 1."""
    for name, value in theirs.items():
        bound = ulps * np.finfo("f").eps * max(np.abs(value).max(initial=0), 1)
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize("kind", [Transformer, Convolutional])
def test_nnx_models_train_as_mirrored_ones_do(kind):
    batches = WORDS if kind is Transformer else PICTURES
    for compiled, given in ((True, batches), (False, batches[:2])):
        losses, ours = trained(sharded(), kind, given, compiled)
        wanted, theirs = trained(mirrored(), kind, given, compiled)
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)
        require_same(numbers(*ours), numbers(*theirs), 256)


def test_nnx_holds_an_array_of_all_parts():
    _, (model, optimizer) = trained(sharded(), Transformer, WORDS[:1], compiled=True)
    embedding = model.words.embedding
    slots = [
        variable
        for _, variable in nnx.iter_graph(optimizer)
        if isinstance(variable, nnx.Variable) and variable.get_raw_value().shape == embedding.shape
    ]
    assert len(slots) == 2
    for variable in (embedding, *slots):
        parts = variable.get_raw_value().addressable_shards
        assert [part.data.shape for part in parts] == [(VOCABULARY // 4, WIDTH)] * 4


def fitted(strategy):
    """Return the losses of a Keras model, and all its variables."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.Conv2D(8, 3, use_bias=False),
                layers.BatchNormalization(),
                layers.Flatten(),
                layers.Dense(16, activation="relu"),
                layers.Dense(3, activation="softmax"),
            ]
        )
    model.compile(keras.optimizers.Adam(1e-2, clipnorm=1.0), "sparse_categorical_crossentropy")
    history = model.fit(IMAGES, LABELS, batch_size=10, epochs=STEPS // 3, verbose=0)
    return history.history["loss"], model


def values(model):
    everything = [*model.variables, *model.optimizer.variables]
    return {index: np.asarray(variable.value) for index, variable in enumerate(everything)}


def test_keras_fit():
    (losses, ours), (wanted, theirs) = fitted(sharded()), fitted(mirrored())
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    require_same(values(ours), values(theirs), 64)
    kernel = ours.layers[3].kernel
    slots = [v for v in ours.optimizer.variables if v.shape == kernel.shape]
    assert len(slots) == 2
    for variable in (kernel, *slots):
        parts = variable.value.addressable_shards
        assert [part.data.shape for part in parts] == [(32, 16)] * 4
    predicted, others = (model.predict(IMAGES, verbose=0) for model in (ours, theirs))
    np.testing.assert_allclose(predicted, others, rtol=1e-5, atol=1e-6)
    loss, other = (model.evaluate(IMAGES, LABELS, verbose=0) for model in (ours, theirs))
    assert loss == pytest.approx(other, rel=1e-5)


def test_the_program_of_fit_takes_a_part_of_the_state():
    bytes_of = {}
    for make in (sharded, mirrored):
        _, model = fitted(make())
        step = model.train_function
        state = model._get_jax_state(
            trainable_variables=True, non_trainable_variables=True,
            optimizer_variables=True, metrics_variables=True,
        )  # fmt: skip
        compiled = step._step.trace(step._placed(state), (IMAGES[:8], LABELS[:8], None))
        memory = compiled.lower().compile().memory_analysis()
        bytes_of[make] = memory.argument_size_in_bytes
        if make is sharded:
            arrays = jax.tree.leaves(state)
            whole = sum(a.nbytes for a in arrays if not in_parts_of(a.shape))
            rest = sum(a.nbytes for a in arrays) - whole
    rows = (IMAGES[:8].nbytes + jnp.asarray(LABELS[:8]).nbytes) / 4
    assert bytes_of[sharded] <= 1.02 * (rest / 4 + whole + rows)
    assert bytes_of[sharded] < bytes_of[mirrored] / 3


def in_parts_of(shape):
    """Tell whether the dimension that is divided divides evenly; else Keras keeps it whole."""
    return bool(shape) and max(shape) % 4 == 0


def test_weights_that_the_program_assigns_are_divided_again():
    strategy = sharded()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(8, use_bias=False)])
    strategy.run(lambda: model(np.ones((2, 8), "f")))
    model.set_weights([np.full((8, 8), 2, "f")])
    total = strategy.run(rx.function(lambda: jnp.sum(model.layers[0].kernel + 0.0)))
    assert [float(each) for each in total.values] == [128.0] * 4
    with strategy.scope():
        rx.function(lambda: model.layers[0].kernel.assign(jnp.ones((8, 8))))()
    parts = model.layers[0].kernel.value.addressable_shards
    assert [part.data.shape for part in parts] == [(2, 8)] * 4
    assert float(model(np.ones((1, 8), "f"))[0, 0]) == 8.0
