"""The models of a strategy are distributed, and others are left alone."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from keras_models import LABELS, TABLE, dense, keras, layers

import replicax as rx

# Keras 3.15 converts its variables in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def fitted(model):
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(TABLE[:6], LABELS[:6], verbose=0)
    return {len(variable.value.devices()) for variable in model.variables}


def test_two_strategies_and_none_do_not_disturb_each_other(two):
    other = rx.MirroredStrategy([f"CPU:{index}" for index in range(2, 5)])
    keras.utils.set_random_seed(1)
    plain = dense()
    keras.utils.set_random_seed(1)
    with two.scope():
        first = dense()
    keras.utils.set_random_seed(1)
    with other.scope():
        second = dense()
    for _ in range(2):  # each with its own, in turn
        assert fitted(first) == {2}
        assert fitted(second) == {3}
        assert fitted(plain) == {1}
    for ours, theirs in zip(first.weights, plain.weights, strict=True):
        np.testing.assert_allclose(np.asarray(ours.value), np.asarray(theirs.value), rtol=1e-5)
    assert keras.distribution.distribution() is None


def test_inside_of_the_scope_too(two):
    with two.scope():
        model = dense()
        assert fitted(model) == {2}
        assert model.predict(TABLE[:5], verbose=0).shape == (5, 3)


def test_a_model_without_a_strategy_may_be_fitted_in_a_scope(two):
    model = dense()
    with two.scope():
        assert fitted(model) == {1}
        assert keras.distribution.distribution() is not None
    assert fitted(model) == {1}


def test_weights_that_share_an_array(two):
    """Two variables may share an array, as a weight and its moving average do after `fit`."""
    with two.scope():
        model = dense()
        model.compile(keras.optimizers.SGD(0.1, use_ema=True), "sparse_categorical_crossentropy")
    for _ in range(2):
        model.fit(TABLE[:6], LABELS[:6], verbose=0)
    average = model.optimizer.variables[-1].value
    np.testing.assert_array_equal(np.asarray(average), np.asarray(model.weights[-1].value))


def test_a_scope_that_is_cleared_notes_models_all_the_same(two):
    with two.scope():
        keras.utils.clear_session()
        model = dense()
        metric = keras.metrics.Mean()
    two.run(lambda: metric.update_state(1.0))
    assert fitted(model) == {2}


def test_the_distribution_of_the_user_comes_back(two):
    own = keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:2])
    with own.scope():
        with two.scope():
            assert keras.distribution.distribution() is not own
        assert keras.distribution.distribution() is own


def test_saved_models_are_those_of_plain_keras(two, tmp_path):
    with two.scope():
        model = dense()
    fitted(model)
    path = tmp_path / "model.keras"
    model.save(path)
    plain = keras.saving.load_model(path)
    with two.scope():
        loaded = keras.saving.load_model(path)
    for other in (plain, loaded):
        for ours, theirs in zip(model.weights, other.weights, strict=True):
            np.testing.assert_array_equal(np.asarray(ours.value), np.asarray(theirs.value))
    loaded.fit(TABLE[:6], LABELS[:6], verbose=0)
    plain.fit(TABLE[:6], LABELS[:6], verbose=0)
    for ours, theirs in zip(loaded.weights, plain.weights, strict=True):
        np.testing.assert_allclose(np.asarray(ours.value), np.asarray(theirs.value), rtol=1e-5)
    model.set_weights(plain.get_weights())  # which brings them to both devices again
    assert fitted(model) == {2}


def test_a_model_with_a_step_of_its_own(two):
    class Doubling(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = layers.Dense(3, activation="softmax")

        def call(self, x):
            return self.layer(x)

        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {**logs, "double": 2 * logs["loss"]}, state

    keras.utils.set_random_seed(1)
    with two.scope():
        model = Doubling()
    model.compile("sgd", "sparse_categorical_crossentropy")
    history = model.fit(TABLE, LABELS, verbose=0).history
    assert {len(variable.value.devices()) for variable in model.variables} == {2}
    assert history["double"][0] == pytest.approx(2 * history["loss"][0], rel=0.2)


def run(program, backend):
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


IN_A_SCOPE = """
import replicax as rx
rx.config.set_logical_cpu_devices(2)
with rx.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    import keras
    variable = keras.Variable([1.0])
    model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(keras.ops.ones((4, 2)), keras.ops.ones((4, 1)), verbose=0)
print(len(model.weights[0].value.devices()), "devices")
"""


def test_keras_may_be_imported_inside_of_a_scope():
    ended = run(IN_A_SCOPE, "jax")
    assert ended.stdout == "2 devices\n", ended.stderr


def test_other_backends_are_refused():
    ended = run(IN_A_SCOPE, "numpy")
    assert "runs on the backend 'numpy'" in ended.stderr
    assert "Set the environment variable KERAS_BACKEND to 'jax'" in ended.stderr
