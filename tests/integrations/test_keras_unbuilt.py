"""Keras models that are made, or built, by the step that trains them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import equal, per_replica

import replicax as rx

keras = pytest.importorskip("keras", reason="Keras is not installed: pip install replicax[keras]")

ROWS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def unbuilt():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])


def trained(model, optimizer, x, run):
    def step(x):
        variables = lambda: model.trainable_variables  # noqa: E731
        loss, gradients = rx.value_and_grad(lambda: jnp.sum(model(x) ** 2), variables)()
        optimizer.apply_gradients(zip(gradients, variables(), strict=True))
        return loss

    return [run(step, x) for _ in range(3)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_it_equals_one_device(two, compiled):
    with two.scope():
        model, optimizer = unbuilt(), keras.optimizers.Adam(0.1)
    programs = {}

    def run(step, x):
        function = programs.setdefault("step", rx.function(step)) if compiled else step
        return float(two.reduce("SUM", two.run(function, args=(x,)), axis=None))

    losses = trained(model, optimizer, per_replica(two, [ROWS[:2], ROWS[2:]]), run)
    alone, its_optimizer = unbuilt(), keras.optimizers.Adam(0.1)
    expected = trained(alone, its_optimizer, ROWS, lambda step, x: float(step(x)))
    equal(losses, expected, 1e-4)
    for mine, theirs in zip(model.weights, alone.weights, strict=True):
        equal(mine.value, theirs.value, 1e-4)


def test_a_list_of_nothing_is_refused(two):
    with two.scope():
        model = unbuilt()
    with pytest.raises(ValueError, match=r"no variables yet\. Build it first, or pass"):
        two.run(lambda: rx.grad(lambda: jnp.sum(model(ROWS)), model.trainable_variables)())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_keras_model_made_in_the_step_trains(two, compiled):
    made = []
    rows = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)

    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    def make():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
        return model, keras.optimizers.SGD(0.1)

    def replica_step(x):
        if not made:
            made.append(make())
        model, optimizer = made[0]
        variables = model.trainable_variables
        value, gradients = rx.value_and_grad(lambda: loss(model, x), variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return value

    step = rx.function(replica_step) if compiled else replica_step
    batch = per_replica(two, [rows[:2], rows[2:]])
    losses = [float(two.reduce("SUM", two.run(step, args=(batch,)), axis=None)) for _ in range(3)]
    assert len(made) == 1

    model, optimizer = make()
    variables = model.trainable_variables
    for expected in losses:
        value, gradients = rx.value_and_grad(lambda: loss(model, rows), variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        equal(value, expected, 1e-5)
    for mine, theirs in zip(made[0][0].weights, model.weights, strict=True):
        equal(mine.value, theirs.value, 1e-5)
