"""Optimizers, `extended.update`, variables in parts, and rows: what servers compute themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx

partitioners = rx.experimental.partitioners

TRANSFORMATIONS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.1),
    "adamw": lambda: optax.adamw(optax.linear_schedule(0.1, 0.01, 5)),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.rmsprop(0.1)),
}
START = {"a": np.float32([1, 2, 3]), "b": np.float32([[1, -1]] * 5), "c": np.float32(4)}


def gradients(step: int) -> dict[str, np.ndarray]:
    rng = np.random.RandomState(step)
    return {name: np.asarray(rng.randn(*value.shape), np.float32) for name, value in START.items()}


def expected(tx: optax.GradientTransformation, steps: int) -> dict[str, np.ndarray]:
    params = {name: jnp.asarray(value) for name, value in START.items()}
    state = tx.init(params)
    for step in range(steps):
        updates, state = tx.update(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize("in_parts", [False, True])
def test_an_optimizer_on_servers(make, name, in_parts):
    partitioner = partitioners.FixedShardsPartitioner(3) if in_parts else None
    ps = make(workers=1, servers=2, partitioner=partitioner)
    tx = TRANSFORMATIONS[name]()
    variables = {key: ps.variable(value, name=key) for key, value in START.items()}
    with ps.strategy.scope():
        optimizer = rx.Optimizer(tx)

    @rx.function
    def step(gradients):
        def replica_fn():
            pairs = [(gradients[key], variables[key]) for key in variables]
            optimizer.apply_gradients(pairs)
            return variables["a"].value

        return ps.strategy.run(replica_fn)

    if in_parts and name == "clipped":
        with pytest.raises(ValueError, match="which is on another parameter server"):
            ps.coordinator.schedule(step, args=(gradients(0),))
        return
    for number in range(4):
        seen = ps.coordinator.schedule(step, args=(gradients(number),)).fetch()
    wanted = expected(tx, 4)
    for key, variable in variables.items():
        np.testing.assert_allclose(variable.numpy(), wanted[key], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(seen, wanted["a"], rtol=1e-5)
    assert optimizer.iterations.numpy() == 4


def test_updates_of_several_workers_are_all_counted(make):
    ps = make(workers=3, servers=2)
    weights = [ps.variable(0.0), ps.variable(np.zeros(4, np.float32))]
    with ps.strategy.scope():
        optimizer = rx.Optimizer(optax.sgd(1.0))

    @rx.function
    def step(x):
        optimizer.apply_gradients([(x, weights[0]), (x * jnp.ones(4), weights[1])])

    for _ in range(60):
        ps.coordinator.schedule(step, args=(jnp.float32(1),))
    ps.coordinator.join()
    assert weights[0].numpy() == -60
    assert weights[1].numpy().tolist() == [-60] * 4
    assert optimizer.iterations.numpy() == 60


def test_an_update_that_needs_another_server_is_refused(make):
    ps = make(workers=1, servers=2)
    weights = [ps.variable(1.0, name="first"), ps.variable(2.0, name="second")]

    def coupled(updates, state, params):
        total = sum(params.values())
        return {name: update * total for name, update in updates.items()}, state

    with ps.strategy.scope():
        tx = optax.GradientTransformation(lambda params: optax.EmptyState(), coupled)
        optimizer = rx.Optimizer(tx)
    step = rx.function(lambda: optimizer.apply_gradients([(1.0, weight) for weight in weights]))
    with pytest.raises(ValueError, match="'first' needs 'second', which is on another"):
        ps.coordinator.schedule(step)


def test_extended_update(make):
    ps = make(workers=2, servers=2)
    weight = ps.variable(np.float32([1, 2]))
    with ps.strategy.scope(), ps.strategy.extended.colocate_vars_with(weight):
        slot = rx.Variable(np.float32([0, 0]))

    def update(weight, slot, gradient, rate):
        slot.assign(0.5 * slot + gradient)
        weight.assign_sub(rate * slot)
        return slot.value

    @rx.function
    def step(gradient):
        return ps.strategy.extended.update(weight, update, args=(slot, gradient, 0.1))

    for _ in range(5):
        ps.coordinator.schedule(step, args=(jnp.float32([1, 2]),))
    ps.coordinator.join()
    w, s = np.float32([1, 2]), np.float32([0, 0])
    for _ in range(5):
        s = np.float32(0.5) * s + np.float32([1, 2])
        w = w - np.float32(0.1) * s
    np.testing.assert_allclose(weight.numpy(), w, rtol=1e-6)
    np.testing.assert_allclose(slot.numpy(), s, rtol=1e-6)

    @rx.function
    def with_a_hidden_argument(x):
        y = x * 2.0
        ps.strategy.extended.update(weight, lambda weight: weight.assign_add(y))

    with pytest.raises(ValueError, match="Pass it in `args`"):
        ps.coordinator.schedule(with_a_hidden_argument, args=(jnp.ones(2),))


def test_variables_in_parts(make):
    ps = make(workers=2, servers=2, partitioner=partitioners.FixedShardsPartitioner(5))
    start = np.arange(26, dtype=np.float32).reshape(13, 2)
    table = ps.variable(start, name="table")
    assert [part.shape for part in table.variables] == [(3, 2)] * 3 + [(2, 2)] * 2
    assert [part.device.index for part in table.variables] == [0, 1, 0, 1, 0]
    assert str(table.device) == "/job:ps/replica:0/task:0/device:CPU:0"
    np.testing.assert_array_equal(table.numpy(), start)
    np.testing.assert_array_equal(table.variables[4].numpy(), start[11:])
    table.variables[0].assign_add(np.ones((3, 2)))
    step = rx.function(lambda: (table.assign_sub(jnp.ones((13, 2))).value.sum(), table[12]))
    total, last = ps.coordinator.schedule(step).fetch()
    assert total == start.sum() + 6 - 26
    assert last.tolist() == [23, 24]
    np.testing.assert_array_equal(table.numpy()[:3], start[:3])


def test_a_partitioner_that_makes_no_sense(make):
    ps = make(partitioner=lambda shape, dtype: [1, 2])
    with pytest.raises(ValueError, match="which is 1 for all but the first"):
        ps.variable(np.zeros((4, 4)))
    assert ps.variable(1.0).numpy() == 1


@pytest.mark.parametrize("parts", [1, 3])
def test_rows(make, parts):
    """Only rows travel, and a row that occurs twice gets both changes."""
    ps = make(workers=1, servers=2, partitioner=partitioners.FixedShardsPartitioner(parts))
    start = np.arange(20, dtype=np.float32).reshape(10, 2)
    table = ps.variable(start, name="table")
    methods = []
    for actor in ps.engine.server_actors:
        actor.before = methods.append

    @rx.function
    def step(rows):
        found = table.sparse_read(rows)
        loss, gradient = jax.value_and_grad(lambda x: jnp.sum(x**2))(found)
        table.scatter_sub(rx.IndexedSlices(0.5 * gradient, rows))
        return found, loss

    rows = np.array([[7, 0], [7, 3]])
    found, loss = ps.coordinator.schedule(step, args=(rows,)).fetch()
    np.testing.assert_array_equal(found, start[rows])
    assert loss == (start[rows] ** 2).sum()
    wanted = start.copy()
    np.subtract.at(wanted, rows, start[rows])
    assert "read" not in methods
    np.testing.assert_array_equal(table.numpy(), wanted)
    np.testing.assert_array_equal(table.sparse_read([9, 1, 9]), wanted[[9, 1, 9]])
    table.scatter_add(rx.IndexedSlices(np.ones((2, 2), np.float32), [4, 4]))
    wanted[4] += 2
    np.testing.assert_array_equal(table.numpy(), wanted)
    with pytest.raises(ValueError, match="has 10 rows, numbered from 0; got row 10"):
        table.sparse_read([10])
    ps.coordinator.schedule(step, args=(np.array([[0, -1], [0, 0]]),))
    with pytest.raises(ValueError, match="'table' has 10 rows, numbered from 0; got row -1"):
        ps.coordinator.join()
    np.testing.assert_array_equal(table.numpy(), wanted)


def test_rows_that_cannot_be_looked_up(make):
    ps = make(workers=1, servers=1)
    table, pointers = ps.variable(np.zeros((4, 2))), ps.variable(np.zeros(4, np.int32))
    schedule, one = ps.coordinator.schedule, np.array([1])

    def after_a_write(rows):
        table.assign_add(jnp.ones((4, 2)))
        return table.sparse_read(rows)

    with pytest.raises(RuntimeError, match="were looked up after the same function had changed"):
        schedule(rx.function(after_a_write), args=(one,))
    with pytest.raises(ValueError, match="whose numbers depend on rows of"):
        schedule(rx.function(lambda i: table.sparse_read(pointers.sparse_read(i))), args=(one,))
    with pytest.raises(RuntimeError, match="was looked up inside of a JAX transformation"):
        schedule(
            rx.function(lambda i: jax.grad(lambda x: (x * table.sparse_read(i)).sum())(1.0)),
            args=(one,),
        )
    lookup = rx.function(lambda: table.sparse_read(pointers.value[:2]))
    assert schedule(lookup).fetch().tolist() == [[0, 0], [0, 0]]
