"""The texts of errors and hints."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import equal

import replicax as rx
from replicax._describing import described

LARGE = np.arange(100_000, dtype=np.float32).reshape(1000, 100)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (LARGE, "array of shape (1000, 100) and dtype float32: 0.0, 1.0, 2.0, ..."),
        (jnp.ones(2), "array of shape (2,) and dtype float32: 1.0, 1.0"),
        (np.zeros((0, 3)), "array of shape (0, 3) and dtype float64"),
        (jnp.asarray(True), "array of shape () and dtype bool: True"),
        (jax.random.key(0), "array of shape () and dtype key<fry>"),
        (np.array(["a"]), "array of shape (1,) and dtype <U1"),
        ([LARGE, 1], "[array of shape (1000, 100) and dtype float32: 0.0, 1.0, 2.0, ..., 1]"),
        ("text", "'text'"),
        (None, "None"),
    ],
)
def test_a_value_in_words(value, words):
    assert described(value) == words


def test_long_things_are_shortened():
    assert len(described("x" * 10_000)) < 250
    assert len(described(list(range(10_000)))) < 100
    assert len(described({str(i): LARGE for i in range(100)})) < 500


def test_traced_arrays_have_no_numbers():
    said = []
    jax.jit(lambda x: said.append(described(x)))(jnp.ones(3))
    assert said == ["array of shape (3,) and dtype float32"]


def wrong_calls(strategy):
    with strategy.scope():
        optimizer = rx.Optimizer(__import__("optax").sgd(0.1))
    array = jnp.asarray(LARGE)
    return {
        "reduce": lambda: strategy.reduce("SUM", array, axis=None),
        "reduce strings": lambda: strategy.reduce("SUM", np.full(10_000, "text"), axis=None),
        "gather": lambda: strategy.gather(array, axis=0),
        "run": lambda: strategy.run(array),
        "function": lambda: rx.function(array),
        "gradients": lambda: rx.grad(lambda: 1.0, [array]),
        "apply": lambda: optimizer.apply_gradients([(array, array)]),
        "update": lambda: strategy.extended.update(array, lambda v: v),
        "minimize": lambda: optimizer.minimize(array, []),
        "distribute": lambda: strategy.experimental_distribute_values_from_function(array),
        "destinations": lambda: strategy.extended.broadcast_to(1.0, LARGE),
        "options": lambda: strategy.run(lambda: None, options=array),
        "static": lambda: rx.function(lambda x: None)({1, 2}),
        "colocate": lambda: strategy.extended.colocate_vars_with(array).__enter__(),
    }


def test_no_message_has_a_whole_array(two):
    for name, call in wrong_calls(two).items():
        with two.scope(), pytest.raises((ValueError, TypeError)) as caught:
            call()
        assert len(str(caught.value)) < 700, name


# Hints.


def test_a_number_that_changes_in_a_differentiated_function_is_told_of_once():
    weight = rx.Variable(2.0)

    def gradient(number):
        return rx.grad(lambda: weight**2 * number, weight)()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(40):
            equal(gradient(float(number)), 4.0 * number)
    (told,) = caught
    assert issubclass(told.category, rx.errors.PerformanceHint)
    assert "gradient" in str(told.message)
    assert "make the numbers arrays" in str(told.message)
    assert told.filename == __file__


def test_replicas_are_told_once_together(two):
    with two.scope():
        weight = rx.Variable(2.0)
    numbers = iter(range(1000))

    def step():
        number = float(next(numbers))
        return rx.grad(lambda: weight**2 * number, weight)()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(40):
            two.run(step)
    assert len(caught) == 1


def test_numbers_in_arrays_need_no_hint(two):
    weight = rx.Variable(2.0)
    for number in range(40):
        equal(rx.grad(lambda x: weight**2 * x, weight)(jnp.float32(number)), 4.0 * number)
