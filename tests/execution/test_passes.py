"""The number of times a function is traced, and the work that the first pass leaves out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx
from replicax.execution._state_cells import Cell
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


@pytest.mark.parametrize("synchronization", ["AUTO", "ON_READ"])
def test_a_rule_for_a_derivative_may_write_what_the_function_only_reads(two, synchronization):
    with two.scope():
        w = rx.Variable(3.0)
        calls = rx.Variable(0.0, synchronization=synchronization, aggregation="SUM")

    @jax.custom_vjp
    def counted(x):
        return x

    def backward(_, cotangent):
        calls.assign_add(0.5)
        return (cotangent,)

    counted.defvjp(lambda x: (x, None), backward)
    step = rx.function(lambda: rx.grad(lambda: counted(w.value) + 0 * calls.value, w)())
    for _ in range(3):
        two.run(step)
    assert float(calls.value) == 3.0


def test_updates_are_computed_in_the_pass_that_makes_the_program(two):
    with two.scope():
        w, rate = rx.Variable(3.0), rx.Variable(0.5)
    updates = []

    def update(gradients, state, params=None):
        updates.append(1)
        return jax.tree.map(lambda gradient: -rate.value * gradient, gradients), state

    with two.scope():
        tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
        optimizer = rx.Optimizer(tx, reduction="MEAN")

    @rx.function
    def step():
        optimizer.apply_gradients([(rx.grad(lambda: w**2, w)(), w)])

    two.run(step)  # 3 - 0.5 * 6
    # The first attempt does not know of the rate, which only the update reads.
    assert float(w) == 0.0
    assert len(updates) <= 3
    w.assign(3.0)
    rate.assign(0.25)
    two.run(step)
    assert (float(w), step.tracing_count) == (1.5, 1)


def test_a_jitted_part_sees_what_was_written_between_its_calls(two):
    with two.scope():
        w = rx.Variable(2.0, aggregation="MEAN")
    scaled = jax.jit(lambda x: x * w.value)

    def step():
        before = scaled(3.0)
        w.assign(2 * w)
        return before, scaled(3.0)

    compiled = rx.function(step)
    assert [float(rx.first(x)) for x in two.run(compiled)] == [6.0, 12.0]
    assert [float(rx.first(x)) for x in two.run(compiled)] == [12.0, 24.0]


@pytest.mark.parametrize("differentiated", [False, True])
def test_only_states_that_transformations_use_are_refs(two, differentiated):
    with two.scope():
        plain = rx.Variable(1.0, aggregation="MEAN")
        carried = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")

    def loop():
        def body(total, x):
            carried.assign_add(x)
            return total + x * carried.value, None

        return jax.lax.scan(body, jnp.zeros(()), jnp.arange(3.0))[0]

    @rx.function
    def step():
        two.run(lambda: plain.assign(2 * plain))
        if differentiated:
            return two.run(lambda: rx.grad(lambda: plain * carried.value, plain)())
        return two.run(loop)

    assert str(step.trace().jaxpr).count("new_ref") == (0 if differentiated else 1)
    results = [float(rx.first(step())) for _ in range(2)]
    # 1 * (0 + 1) + 2 * (0 + 1 + 2), and the same when it begins with 3
    assert results == ([0.0, 0.0] if differentiated else [7.0, 16.0])
    assert (float(plain), float(carried)) == (4.0, 0.0 if differentiated else 12.0)


def test_a_state_is_never_weakly_typed():
    cell = Cell(jnp.zeros(()))
    cell.write(jnp.asarray(1.0))
    assert cell.last().dtype == jnp.float32
    assert not cell.last().weak_type


def test_python_state_that_changes_is_told_beside_a_derivative_too(two):
    with two.scope():
        w, average = rx.Variable(3.0), rx.Variable(0.0, aggregation="MEAN")
    calls = []

    @rx.function
    def step():
        calls.append(1)
        if len(calls) > 1:
            average.assign(1.0)
        return rx.grad(lambda: w**2, w)()

    with pytest.raises(rx.errors.InconsistentTracing, match="look for Python state"):
        two.run(step)
    assert float(average.value) == 0.0


def test_a_jitted_part_may_be_shared_by_two_runs_of_a_function(two):
    with two.scope():
        w = rx.Variable(2.0, aggregation="SUM")
    scaled = jax.jit(lambda x: x * w.value)

    @rx.function
    def both():
        first = two.run(lambda: scaled(3.0))
        two.run(lambda: w.assign(2.0))
        return first, two.run(lambda: scaled(3.0))

    assert [float(rx.first(value)) for value in both()] == [6.0, 12.0]


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (0, 3)])
def test_what_all_replicas_have_in_common_is_reduced_and_gathered_in_a_program(two, shape):
    @rx.function
    def combined():
        ones = two.run(lambda: jnp.ones(shape))
        return two.reduce("SUM", ones, axis=None), two.gather(ones, axis=0) if shape else ones

    total, gathered = combined()
    np.testing.assert_array_equal(total, 2 * np.ones(shape))
    if shape:
        assert gathered.shape == (2 * shape[0], *shape[1:])


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


kept = []


@pytest.mark.parametrize(
    "make",
    [
        lambda w: [w if float(w[0]) > 0 else -w],
        lambda w: [-w[w < 0]],
        lambda w: [jax.device_put(-w, w.sharding)],
        lambda w: [kept.append(w) or -w],  # to use it later
    ],
    ids=["a condition", "a mask", "a sharding", "kept"],
)
def test_what_needs_the_numbers_themselves_is_called_with_them(make):
    w = jnp.float32([-3])
    np.testing.assert_array_equal(computed_at_once(make, [w])[0], [3])
    assert kept.pop() is w if kept else True


def test_slots_are_made_where_their_variables_are():
    device = jax.devices()[1]
    w = jax.device_put(jnp.float32([1, 2]), device)
    assert computed_at_once(lambda w: [jnp.zeros_like(w)], [w])[0].devices() == {device}


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
