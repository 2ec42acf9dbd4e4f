"""Copies of variables and optimizers by `copy.deepcopy`."""

from __future__ import annotations

import copy
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import equal, per_replica

import replicax as rx


@pytest.mark.parametrize("synchronization", ["AUTO", "ON_READ"])
def test_a_copy_is_another_variable_with_the_same_value(strategy, execution, synchronization):
    with strategy.scope():
        variable = rx.Variable(
            np.float32([1.0, 2.0]),
            name="weight",
            trainable=False,
            synchronization=synchronization,
            aggregation="SUM",
        )
    own = per_replica(strategy, [np.float32([r, 0]) for r in range(strategy.num_replicas_in_sync)])
    strategy.run(lambda x: variable.assign_add(x), args=(own,))
    before = [each.numpy() for each in variable.values]
    copied = copy.deepcopy(variable)
    assert type(copied) is type(variable)
    assert (copied.name, copied.trainable) == ("weight", False)
    assert (copied.synchronization, copied.aggregation) == (
        variable.synchronization,
        variable.aggregation,
    )
    with strategy.scope():
        assert strategy.extended.variable_created_in_scope(copied)
    strategy.run(lambda x: copied.assign_add(x + 1), args=(own,))
    strategy.run(lambda x: copied.assign_add(x + 1), args=(own,))
    for mine, old in zip(variable.values, before, strict=True):
        equal(mine.numpy(), old)
    strategy.run(lambda x: variable.assign_add(x + 1), args=(own,))
    strategy.run(lambda x: variable.assign_add(x + 1), args=(own,))
    for mine, other in zip(variable.values, copied.values, strict=True):
        equal(mine.numpy(), other.numpy())


def test_a_nest_is_copied_with_its_ties(strategy):
    with strategy.scope():
        shared = rx.Variable(1.0)
    model = {"encoder": shared, "decoder": [shared, rx.Variable(2.0)]}
    copied = copy.deepcopy(model)
    assert copied["encoder"] is copied["decoder"][0]
    assert copied["encoder"] is not shared
    assert copied["decoder"][1].strategy is None


def test_copies_keep_where_they_are_and_how_they_are_divided():
    strategy = rx.MirroredStrategy(
        ["CPU:0", "CPU:1", "CPU:2", "CPU:3"], logical_devices_per_replica=2
    )
    with strategy.scope(), strategy.extended.partition([1, 2]):
        divided = rx.Variable(jnp.ones((2, 4)))
    copied = copy.deepcopy(divided)
    assert copied.partition == divided.partition
    assert copied.value.sharding == divided.value.sharding
    plain = rx.Variable(jax.device_put(1.0, jax.devices()[3]))
    assert copy.deepcopy(plain).device == plain.device
    first, second = copy.deepcopy(divided.values)
    assert first.container is second.container


def test_a_variable_is_not_copied_in_a_function(two, execution):
    with two.scope():
        variable = rx.Variable(1.0)
    with pytest.raises(RuntimeError, match=r"was copied in a function.*outside of `run`"):
        two.run(lambda: copy.deepcopy(variable))


def train(strategy, optimizer, weight, steps):
    own = per_replica(strategy, [np.float32(r + 1) for r in range(strategy.num_replicas_in_sync)])
    for _ in range(steps):
        strategy.run(lambda x: optimizer.minimize(lambda: x * weight**2, [weight]) * 0, args=(own,))


@pytest.mark.parametrize("trained", [0, 2])
def test_an_optimizer_copied_with_its_variables_goes_on_with_the_copies(
    strategy, execution, trained
):
    with strategy.scope():
        weight = rx.Variable(1.0, name="weight")
        optimizer = rx.Optimizer(optax.adam(0.1))
    train(strategy, optimizer, weight, trained)
    other_optimizer, other_weight = copy.deepcopy((optimizer, weight))
    train(strategy, optimizer, weight, 2)
    assert int(other_optimizer.iterations) == trained
    train(strategy, other_optimizer, other_weight, 2)
    equal(other_weight.numpy(), weight.numpy())
    for mine, theirs in zip(optimizer.variables, other_optimizer.variables, strict=True):
        assert mine is not theirs
        equal(mine.numpy(), theirs.numpy())


def test_an_optimizer_copied_alone_goes_on_with_the_same_variables(two, execution):
    with two.scope():
        weight = rx.Variable(1.0, name="weight")
        optimizer = rx.Optimizer(optax.adam(0.1))
    train(two, optimizer, weight, 1)
    at_the_copy = float(weight)
    other = copy.deepcopy(optimizer)
    train(two, optimizer, weight, 1)
    after = float(weight)
    weight.assign(at_the_copy)
    train(two, other, weight, 1)
    equal(weight.numpy(), after)
    with two.scope():
        stranger = rx.Variable(jnp.ones(3), name="stranger")
    with pytest.raises(ValueError, match="trains 'weight', and was given gradients for 'stranger'"):
        two.run(lambda: other.apply_gradients([(jnp.ones(3), stranger)]))


def test_copies_of_the_same_name_in_another_order(two, execution):
    def made():
        with two.scope():
            return [rx.Variable(1.0), rx.Variable(5.0)], rx.Optimizer(optax.adam(0.1))

    def step(variables, optimizer, order):
        pairs = [(variable.value, variable) for variable in variables]
        optimizer.apply_gradients([pairs[index] for index in order])

    (variables, optimizer), (expected, alone) = made(), made()
    two.run(lambda: step(variables, optimizer, (0, 1)))
    copies, its_optimizer = copy.deepcopy((variables, optimizer))
    two.run(lambda: step(copies, its_optimizer, (1, 0)))
    for _ in range(2):
        two.run(lambda: step(expected, alone, (0, 1)))
    for mine, theirs in zip(copies, expected, strict=True):
        equal(mine.numpy(), theirs.numpy())


def test_a_checkpoint_of_copies_has_the_same_names(two, tmp_path):
    with two.scope():
        weight = rx.Variable(1.0, name="weight")
        optimizer = rx.Optimizer(optax.adam(0.1))
    train(two, optimizer, weight, 2)
    path = rx.Checkpoint(weight=weight, optimizer=optimizer).save(str(tmp_path / "model"))
    its_optimizer, other = copy.deepcopy((optimizer, weight))
    train(two, optimizer, weight, 1)
    report = rx.Checkpoint(weight=other, optimizer=its_optimizer).restore(path)
    report.assert_consumed()
    train(two, its_optimizer, other, 1)
    equal(other.numpy(), weight.numpy())


@pytest.mark.parametrize("make", [lambda: rx.Variable(jnp.ones(3)), lambda: rx.Variable(1.0)])
def test_nothing_keeps_an_original_or_an_initial_value_alive(make):
    variable = make()
    copied = copy.deepcopy(variable)
    original = weakref.ref(variable)
    del variable
    gc.collect()
    assert original() is None
    assert copied.numpy().size
    array = jnp.ones(5)
    kept, seen = rx.Variable(array), weakref.ref(array)
    kept.assign(jnp.zeros(5))
    del array
    gc.collect()
    assert seen() is None


def test_a_constraint_of_any_kind_and_a_failed_first_step(two):
    class Positive(list):  # which cannot be hashed
        def __call__(self, value):
            return jnp.maximum(value, 0.0)

    with two.scope():
        weight = rx.Variable(1.0, constraint=Positive())
        optimizer = rx.Optimizer(optax.adam(5.0))
    with pytest.raises(TypeError):
        optimizer.minimize(lambda: weight**2, [weight, 3.0])
    two.run(lambda: optimizer.apply_gradients([(jnp.float32(1.0), weight)]))
    equal(weight.numpy(), 0.0)

    def broken(value):
        raise RuntimeError("no value is good enough")

    with two.scope():
        other = rx.Variable(1.0, constraint=broken)
        fresh = rx.Optimizer(optax.adam(5.0))
    with pytest.raises(RuntimeError, match="good enough"):
        two.run(lambda: fresh.apply_gradients([(jnp.float32(1.0), other)]))
    assert fresh.variables == (fresh.iterations,)
