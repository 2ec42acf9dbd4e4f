"""The changes that the bridge makes to Keras, and their removal."""

from __future__ import annotations

import keras
import numpy as np

import replicax as rx
from replicax import _bridges
from replicax.integrations.keras import uninstall


def attributes() -> dict[tuple[type, str], object]:
    """Return what every class of Keras has: all that are reached from its public classes."""
    public = [keras.Model, keras.Variable, keras.KerasTensor]
    for module in (keras.callbacks, keras.layers, keras.metrics, keras.optimizers):
        public += [thing for thing in vars(module).values() if isinstance(thing, type)]
    classes = {base for kind in public for base in kind.__mro__ if base is not object}
    return {(kind, name): value for kind in classes for name, value in vars(kind).items()}


def fitted(model: keras.Model) -> np.ndarray:
    model.compile(optimizer="sgd", loss="mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=1, batch_size=4, verbose=0)
    return np.asarray(model.weights[0].value)


def made() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])


def changed(before: dict, after: dict) -> set[tuple[type, str]]:
    return {key for key in before | after if before.get(key) is not after.get(key)}


def test_keras_is_left_as_it_was():
    _bridges.load()  # perhaps another test has
    uninstall()
    fitted(made())  # Keras notes things in its classes when they are first used
    original = attributes()
    expected = fitted(made())
    assert not changed(original, attributes())
    with rx.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        distributed = fitted(made())
    ours = changed(original, attributes())
    assert {(keras.Model, "fit"), (keras.optimizers.Optimizer, "apply")} <= ours
    assert len(ours) > 15
    uninstall()
    assert not changed(original, attributes())
    assert keras.distribution.distribution() is None
    np.testing.assert_allclose(fitted(made()), expected)
    np.testing.assert_allclose(distributed, expected, rtol=1e-6)
    with rx.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        assert changed(original, attributes()) == ours
