"""Scheduled functions, their results, their errors, and what they write."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import replicax as rx

index = rx.coordinator.experimental_get_current_worker_index


def test_one_worker_trains_as_numpy_does(make):
    ps = make(workers=1)
    rng = np.random.RandomState(0)
    x = rng.randn(8, 3).astype(np.float32)
    y = (x @ np.float32([[1], [-2], [0.5]])).astype(np.float32)
    weight = ps.variable(np.zeros((3, 1), np.float32))

    def loss_fn(x, y):
        return jnp.mean(jnp.square(x @ weight - y))

    @rx.function
    def step(iterator):
        def replica_fn(batch):
            loss, gradient = rx.value_and_grad(loss_fn, weight)(*batch)
            weight.assign_sub(0.5 * gradient)
            return loss

        return ps.strategy.run(replica_fn, args=(next(iterator),))

    dataset = rx.from_tensor_slices((x, y)).repeat().batch(4)
    iterator = iter(ps.coordinator.create_per_worker_dataset(dataset))
    values = [ps.coordinator.schedule(step, args=(iterator,)) for _ in range(6)]
    losses = ps.coordinator.fetch(values)
    expected, expected_losses = np.zeros((3, 1), np.float32), []
    for at in [0, 4] * 3:
        error = x[at : at + 4] @ expected - y[at : at + 4]
        expected_losses.append(np.mean(error**2))
        expected = expected - np.float32(0.5) * (x[at : at + 4].T @ error) / 2
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-5)
    assert step.tracing_count == 0, "it was never called here"


def test_writes_are_operations_in_their_order(make):
    ps = make()
    number, other = ps.variable(np.int32(1)), ps.variable(10.0)

    @rx.function
    def change():
        number.assign_add(1)
        number.assign(number.value * 10)
        number.assign_sub(3)
        other.assign_sub(0.5)
        return number.value, other.value

    assert ps.coordinator.schedule(change).fetch() == (17, 9.5)
    assert (number.numpy(), other.numpy()) == (17, 9.5)
    assert ps.coordinator.schedule(change).fetch() == (177, 9.0)


def test_what_is_only_written_is_not_read(make):
    ps = make(workers=1)
    table = ps.variable(np.zeros((4, 2), np.float32))
    reads = []
    for actor in ps.engine.server_actors:
        actor.before = reads.append
    add = rx.function(lambda x: (table.assign_add(x), 0)[1])
    ps.coordinator.schedule(add, args=(jnp.ones((4, 2)),)).fetch()
    assert "read" not in reads
    assert table.numpy().tolist() == [[1.0, 1.0]] * 4


def test_many_updates_from_several_workers_add_up(make):
    ps = make(workers=4, servers=3)
    totals = [ps.variable(0.0) for _ in range(3)]

    @rx.function
    def add(x):
        for total in totals:
            total.assign_add(x)

    for number in range(200):
        ps.coordinator.schedule(add, args=(jnp.float32(number),))
    ps.coordinator.join()
    assert [float(total.numpy()) for total in totals] == [sum(range(200))] * 3
    assert ps.coordinator.done()


def test_elements_of_other_shapes_make_another_program(make):
    ps = make(workers=1)
    total = ps.variable(0.0)

    traces = []

    @rx.function
    def step(iterator):
        traces.append(None)
        batch = next(iterator)
        total.assign_add(batch.sum())
        return jnp.asarray(batch.shape[0])

    dataset = rx.from_tensor_slices(np.arange(7, dtype=np.float32)).batch(3)
    for epoch in range(3):
        iterator = iter(ps.coordinator.create_per_worker_dataset(dataset))
        values = [ps.coordinator.schedule(step, args=(iterator,)) for _ in range(3)]
        assert [int(value.fetch()) for value in values] == [3, 3, 1]
        assert float(total.numpy()) == 21 * (epoch + 1)
    assert len(traces) == 4, "of two passes for each shape"
    ps.coordinator.schedule(step, args=(iterator,))
    with pytest.raises(StopIteration):
        ps.coordinator.join()
    ps.coordinator.join()


def test_several_elements_of_several_iterators(make):
    ps = make(workers=1)
    tens = [np.int32(10 * i) for i in range(4)]
    one = iter(ps.coordinator.create_per_worker_dataset(lambda: [np.int32(i) for i in range(4)]))
    ten = iter(ps.coordinator.create_per_worker_dataset(lambda: tens))

    @rx.function
    def step(first, second, again):
        return next(first), next(second), next(again)

    steps = [ps.coordinator.schedule(step, args=(one, ten, one)) for _ in range(2)]
    assert ps.coordinator.fetch(steps) == [(0, 0, 1), (2, 10, 3)]


def test_each_worker_makes_its_dataset(make):
    ps = make(workers=3)
    seen = []

    def dataset_fn():
        seen.append(index())
        return [{"x": np.float32([index()])}] * 50

    iterator = iter(ps.coordinator.create_per_worker_dataset(dataset_fn))
    step = rx.function(lambda it: (index(), next(it)["x"]))
    pairs = [ps.coordinator.schedule(step, args=(iterator,)) for _ in range(30)]
    assert all(worker == x for worker, x in ps.coordinator.fetch(pairs))
    assert set(seen) <= {0, 1, 2}


def test_an_error_is_raised_once_and_cancels_what_waits(make):
    ps = make(workers=1)
    total = ps.variable(0.0)
    held = threading.Event()
    ps.engine.workers[0].before = lambda method: held.wait(30)
    iterator = iter(ps.coordinator.create_per_worker_dataset(lambda: [np.float32(1)] * 2))
    held.set()

    @rx.function
    def step(iterator):
        total.assign_add(next(iterator))

    first = ps.coordinator.schedule(step, args=(iterator,))
    first.fetch()
    held.clear()
    values = [ps.coordinator.schedule(step, args=(iterator,)) for _ in range(4)]
    held.set()
    with pytest.raises(StopIteration):
        ps.coordinator.join()
    assert ps.coordinator.done()
    ps.coordinator.join()
    values[0].fetch()
    with pytest.raises(StopIteration):
        values[1].fetch()
    for value in values[2:]:
        with pytest.raises(rx.errors.ClosureCancelled, match="`step` was not run"):
            value.fetch()
    assert float(total.numpy()) == 2
    assert ps.coordinator.schedule(rx.function(lambda: total.value)).fetch() == 2


def test_what_cannot_be_scheduled(make):
    ps = make(workers=1)
    variable, plain = ps.variable(1.0), rx.Variable(1.0, name="plain")
    schedule = ps.coordinator.schedule
    with pytest.raises(TypeError, match=r"takes an `rx\.function`"):
        schedule(lambda: 1.0)
    with pytest.raises(TypeError, match="For a single argument"):
        schedule(rx.function(lambda x: x), args=3)
    value = schedule(rx.function(lambda: jnp.float32(2)))
    with pytest.raises(ValueError, match="RemoteValue was given"):
        schedule(rx.function(lambda x: x), args=([{"x": value}],))
    with pytest.raises(ValueError, match="'plain', which is not on a parameter server"):
        schedule(rx.function(lambda: plain.value))
    with pytest.raises(RuntimeError, match="written inside of a JAX transformation"):
        schedule(rx.function(lambda: jax.lax.cond(True, lambda: variable.assign(2.0).value, float)))
    with pytest.raises(RuntimeError, match="in a function that is differentiated"):
        schedule(rx.function(lambda: rx.grad(lambda: variable.assign_add(1.0) * 1.0, variable)()))
    with pytest.raises(ValueError, match="calls back into Python"):
        schedule(rx.function(lambda: jax.debug.print("{}", variable.value)))
    with pytest.raises(RuntimeError, match="where no worker runs the code"):
        index()
    with pytest.raises(RuntimeError, match="gives its elements on workers"):
        next(iter(ps.coordinator.create_per_worker_dataset([1])))
    with pytest.raises(TypeError, match=r"needs an `rx\.ParameterServerStrategy`"):
        rx.coordinator.ClusterCoordinator(rx.get_strategy())
    assert variable.numpy() == 1


def test_what_the_chief_does_itself(make):
    ps = make()
    variable = ps.variable(2.0, name="v")
    assert ps.strategy.run(lambda x: x * variable, args=(3.0,)) == 6
    assert rx.function(lambda: variable * 2.0)() == 4
    ps.strategy.run(lambda: variable.assign_add(1.0))
    assert variable.numpy() == 3
    with pytest.raises(RuntimeError, match=r"Do it in a function that `coordinator.schedule` runs"):
        rx.function(lambda: variable.assign_add(1.0))()
    with pytest.raises(RuntimeError, match="or by an update outside of functions"):
        ps.strategy.extended.update(variable, lambda v: v.assign(v * 2.0))
    with ps.strategy.scope(), pytest.raises(RuntimeError, match="outside of functions"):
        rx.Optimizer(optax.sgd(0.1)).apply_gradients([(jnp.float32(1), variable)])
    assert variable.numpy() == 3
    assert repr(variable) == "<rx.ServerVariable 'v' shape=() dtype=float32>"
    assert repr(ps.strategy) == "ParameterServerStrategy(1)"


def test_a_function_of_an_object(make):
    ps = make(workers=1)

    class Model:
        def __init__(self) -> None:
            self.scale = ps.variable(3.0)

        @rx.function
        def step(self, x):
            return self.scale * x

    assert ps.coordinator.schedule(Model().step, args=(jnp.float32(2),)).fetch() == 6


def test_programs_are_traced_once_for_each_signature(make):
    ps = make(workers=2)
    traces = []

    @rx.function
    def step(x, scale):
        traces.append(None)
        return x * scale

    for number in range(10):
        ps.coordinator.schedule(step, args=(jnp.float32(number), 2))
    ps.coordinator.join()
    assert len(traces) == 1
    ps.coordinator.schedule(step, args=(jnp.zeros(3), 2))
    ps.coordinator.schedule(step, args=(jnp.float32(1), 3))
    ps.coordinator.join()
    assert len(traces) == 3
