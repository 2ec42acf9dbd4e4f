"""`rx.variables`: which variables a nest has."""

from __future__ import annotations

import dataclasses
import importlib
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx


def same(found: list[rx.Variable], expected: list[rx.Variable]) -> None:
    assert [id(each) for each in found] == [id(each) for each in expected]


@dataclasses.dataclass
class Record:
    kernel: Any
    rest: Any


class Layer:
    def __init__(self, **parts: Any):
        self.variables = parts


def test_variables_of_nests_in_order_and_once(strategy):
    with strategy.scope():
        a, b, c = (rx.Variable(np.full(2, x, np.float32)) for x in (1, 1, 2))  # equal values
        on_read = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    same(rx.variables(a), [a])
    same(rx.variables([]), [])
    same(rx.variables(None), [])
    same(rx.variables([c, {"z": a, "y": (b, a)}, c, on_read]), [c, b, a, on_read])
    same(rx.variables(OrderedDict(z=a, y=b)), [a, b])
    same(rx.variables(Record(c, [b])), [c, b])
    same(rx.variables([a, jnp.ones(2), np.ones(2), 3, "word", None, rx.PerReplica([1])]), [a])
    assert not isinstance(jax.tree.leaves([a])[0], rx.Variable)


def test_objects_that_have_variables(strategy):
    with strategy.scope():
        weight, bias = rx.Variable([1.0, 2.0], name="w"), rx.Variable(0.5, name="b")
        optimizer, metric = rx.Optimizer(optax.adam(0.1)), rx.metrics.Mean()
        optimizer.apply_gradients([(jnp.ones(2), weight)])
    assert len(optimizer.variables) > 2
    model = Layer(inner=Layer(kernel=weight), bias=bias)
    same(rx.variables(model), [bias, weight])
    same(
        rx.variables({"a": model, "b": optimizer, "c": [metric, optimizer]}),
        [bias, weight, *optimizer.variables, *metric.variables],
    )


def test_gradients_with_respect_to_all_of_them(strategy, execution):
    with strategy.scope():
        model = {"kernel": rx.Variable([1.0, 2.0]), "bias": rx.Variable(0.5)}
        optimizer = rx.Optimizer(optax.sgd(0.1))

    def step(x):
        trained = rx.variables(model)
        gradients = rx.grad(lambda: model["kernel"] @ x + model["bias"], trained)()
        optimizer.apply_gradients(zip(gradients, trained, strict=True))

    strategy.run(step, args=(jnp.array([1.0, 2.0]),))
    rate = 0.1 * strategy.num_replicas_in_sync
    np.testing.assert_allclose(model["kernel"].numpy(), [1 - rate, 2 - 2 * rate], rtol=1e-6)
    np.testing.assert_allclose(model["bias"].numpy(), 0.5 - rate, rtol=1e-5)


def test_what_cannot_be_looked_into_is_refused():
    with pytest.raises(TypeError, match=r"which variables a builtins.object has, at \['m'\]\[1\]"):
        rx.variables({"m": [1, object()]})
    with pytest.raises(TypeError, match=r"a builtins.function has, at \.variables\['f'\]"):
        rx.variables(Layer(f=lambda: None))


def test_keras_models_and_their_variables():
    keras = pytest.importorskip("keras", reason="Keras is not installed: replicax[keras]")
    with rx.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.SGD()
        optimizer.build(model.trainable_variables)
    found = rx.variables([model, optimizer])
    assert [v.shape for v in found[:2]] == [(2, 3), (3,)]
    assert len(found) == 2 + len(optimizer.variables)
    same(rx.variables(model.trainable_variables), found[:2])
    np.testing.assert_array_equal(found[0].numpy(), model.layers[0].kernel.value)


def test_flax_modules_are_refused():
    nnx = pytest.importorskip("flax.nnx", reason="Flax is not installed: replicax[flax]")
    with pytest.raises(TypeError, match=r"Linear has\. .* `nnx\.state"):
        rx.variables(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))


def test_the_package_of_that_name_is_still_there():
    package = importlib.import_module("replicax.variables")
    assert package.variables is rx.variables
    assert package.Variable is rx.Variable
