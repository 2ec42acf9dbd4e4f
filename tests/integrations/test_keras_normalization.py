"""`BatchNormalization(synchronized=True)`: in `run`, the statistics are those of all replicas."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import STRATEGIES
from keras_models import IMAGES, TABLE, keras, layers

import replicax as rx

# Keras 3.15 converts its variables in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
ROWS = 8
MASK = np.arange(ROWS * 6).reshape(ROWS, 6) % 5 != 0
CASES = {
    "table": ({}, TABLE[:ROWS], None),
    "images, channels first": ({"axis": 1}, np.moveaxis(IMAGES[:ROWS], 3, 1), None),
    "masked": ({}, IMAGES[:ROWS, ..., 0], MASK),
    "renorm": ({"renorm": True}, TABLE[:ROWS] + 3, None),
}


@pytest.fixture(params=[x for x in ("mirrored 1", "mirrored 2", "workers") if x in STRATEGIES])
def strategy(request):
    return STRATEGIES[request.param]()


def build(shape, **options):
    layer = layers.BatchNormalization(momentum=0.5, **options)
    layer.build((None, *shape))
    return layer, keras.Variable(0.1)


def step_of(layer, bend):
    def step(x, mask):
        def loss():
            # `bend` is in front of the layer, so its gradient goes through the statistics.
            out = layer(x + bend * x**2 / 5, training=True, mask=mask)
            return jnp.sum(jnp.cos(x) * jnp.sin(out)) / ROWS, out

        return rx.value_and_grad(loss, [*layer.trainable_variables, bend], has_aux=True)()

    return step


@functools.cache
def expected(name):
    """One device, with the whole batch."""
    options, x, mask = CASES[name]
    layer, bend = build(x.shape[1:], **options)
    (value, out), gradients = step_of(layer, bend)(x, mask)
    return value, out, gradients, [np.asarray(v.value) for v in layer.weights]


@pytest.mark.parametrize("name", CASES)
def test_replicas_see_the_statistics_of_all(name, strategy, execution):
    options, x, mask = CASES[name]
    with strategy.scope():
        layer, bend = build(x.shape[1:], synchronized=True, **options)
    by_rows = rx.InputOptions(auto_shard_policy="DATA")
    batches = [(x,)] if mask is None else [(x, mask)]
    for batch in strategy.experimental_distribute_dataset(batches, by_rows):
        arguments = batch if mask is not None else (*batch, None)
        (value, out), gradients = strategy.run(step_of(layer, bend), args=arguments)
        wanted_value, wanted, wanted_gradients, weights = expected(name)
        value = strategy.reduce("SUM", value, axis=None)
        np.testing.assert_allclose(strategy.gather(out, axis=0), wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(value, wanted_value, rtol=1e-4)
        for ours, theirs in zip(gradients, wanted_gradients, strict=True):
            total = strategy.reduce("SUM", ours, axis=None)
            np.testing.assert_allclose(total, theirs, rtol=1e-4, atol=1e-5)
        for variable, weight in zip(layer.weights, weights, strict=True):
            np.testing.assert_allclose(np.asarray(variable.value), weight, rtol=1e-4, atol=1e-5)


def test_a_model_of_its_own_and_fit_accept_it(two, tmp_path):
    """In `fit`, and on one device, the batch is whole anyway."""
    results = []
    for options in ({}, {"synchronized": True}):
        keras.utils.set_random_seed(4)
        with two.scope():
            model = keras.Sequential(
                [keras.Input((5,)), layers.BatchNormalization(**options), layers.Dense(1)]
            )
        model.compile("sgd", "mse")
        model.fit(TABLE, TABLE[:, :1], batch_size=10, verbose=0)
        results.append(model.predict(TABLE, verbose=0))
    np.testing.assert_array_equal(*results)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].synchronized
    np.testing.assert_allclose(loaded.predict(TABLE, verbose=0), results[0], rtol=1e-5, atol=1e-6)
