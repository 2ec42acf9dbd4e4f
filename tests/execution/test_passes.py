"""How often a function is traced, and what the pass that finds variables leaves out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax.variables._computed_at_once import computed_at_once

X = np.float32([[1, 2], [3, 4], [5, 6], [7, 8]])


def test_a_function_without_variables_is_traced_once(two):
    calls = []

    def step(params, x):
        calls.append(1)
        loss, gradients = jax.value_and_grad(lambda p: jnp.sum((x @ p) ** 2))(params)
        gradients = rx.get_replica_context().all_reduce("SUM", gradients)
        return params - 0.01 * gradients, loss

    compiled = rx.function(step)
    params = jnp.ones(2)
    for _ in range(3):
        params, _ = two.run(compiled, args=(params, two.split(X)))
    assert len(calls) == 1
    expected = jnp.ones(2)
    for _ in range(3):
        expected = expected - 0.01 * jax.grad(lambda p: jnp.sum((X @ p) ** 2))(expected)
    np.testing.assert_allclose(params, expected, rtol=1e-5)


def test_derivatives_are_taken_in_the_pass_that_makes_the_program(two):
    forward, backward = [], []

    @jax.custom_vjp
    def square(x):
        return x**2

    def square_forward(x):
        return x**2, x

    def square_backward(x, cotangent):
        backward.append(1)
        return (2 * x * cotangent,)

    square.defvjp(square_forward, square_backward)
    with two.scope():
        w = rx.Variable(3.0)

    def step():
        def loss():
            forward.append(1)
            return square(w.value)

        return rx.value_and_grad(loss, w)()

    value, gradient = two.run(rx.function(step))
    np.testing.assert_equal(np.asarray(rx.first((value, gradient))), [9.0, 6.0])
    assert (len(forward), len(backward)) == (2, 1)


def test_a_rule_for_a_derivative_may_use_variables_of_its_own(two):
    with two.scope():
        w, scale = rx.Variable(3.0), rx.Variable(10.0)

    @jax.custom_vjp
    def scaled(x):
        return x

    scaled.defvjp(lambda x: (x, None), lambda _, cotangent: (cotangent * scale.value,))
    step = rx.function(lambda: rx.grad(lambda: scaled(w.value), w)())
    assert float(rx.first(two.run(step))) == 10.0
    scale.assign(20.0)
    assert float(rx.first(two.run(step))) == 20.0


def test_many_numbers_are_computed_at_once():
    w = jnp.float32([1, 2])

    def make(w):
        return {
            "zeros": jnp.zeros_like(w),
            "ones": jnp.ones((2, 3), jnp.bfloat16),
            "count": jnp.zeros((), jnp.int32),
            "same": w,
            "twice": w * 2,
            "keys": jax.random.key(3),
        }

    made, plain = computed_at_once(make, [w]), make(w)
    assert jax.tree.map(jnp.result_type, made) == jax.tree.map(jnp.result_type, plain)
    for name, array in plain.items():
        if name == "keys":
            array, made[name] = map(jax.random.key_data, (array, made[name]))
        np.testing.assert_array_equal(made[name], array)


def test_what_looks_at_numbers_is_called_with_them():
    def make(w):
        return [w if float(w[0]) > 0 else -w]

    np.testing.assert_array_equal(computed_at_once(make, [jnp.float32([-3])])[0], [3])


@pytest.mark.parametrize("inside", [True, False], ids=["compiled", "eager"])
def test_slots_that_are_no_zeros(two, inside):
    """`lookahead` keeps a copy of the params, and others begin with what they compute of them."""
    tx = optax.GradientTransformation(
        lambda params: {"square": jax.tree.map(jnp.square, params), "same": params},
        lambda updates, state, params=None: (
            jax.tree.map(jnp.add, updates, state["square"]),
            state,
        ),
    )
    with two.scope():
        w = rx.Variable([1.0, 3.0])
        optimizer = rx.Optimizer(tx)

    def step():
        optimizer.apply_gradients([(jnp.ones(2), w)])

    two.run(rx.function(step) if inside else step)
    np.testing.assert_array_equal(w.value, [1 + 2 + 1, 3 + 2 + 9])
