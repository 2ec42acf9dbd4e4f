"""Failures, uneven shares, meetings, programs around `run`, and steps inside of other functions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax_models import (
    ROWS,
    Model,
    X,
    Y,
    made,
    nnx,
    numbers,
    over,
    plain_step,
    quick_step,
    same,
    shared,
    step,
)
from support import equal, per_replica

import replicax as rx


@over("mirrored 2")
def test_a_step_that_fails_leaves_everything_as_it_was(strategy, execution):
    ours = made(rate=0.5)
    model, optimizer, metrics = ours
    before = numbers(*ours)
    variables = [v for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)]

    def failing(x, y):
        quick_step(*ours, x, y)
        model.eval()
        model.note = "made by a step"
        context = rx.get_replica_context()
        context.merge_call(lambda strategy: metrics.reset())
        raise KeyError("at the end")

    (batch,) = shared(strategy, (X, Y))
    with pytest.raises(KeyError, match="at the end"):
        strategy.run(failing, args=batch)
    np.testing.assert_equal(numbers(*ours), before)
    assert not model.dropout.deterministic
    assert "note" not in vars(model)
    assert optimizer.tx.update is not None
    assert all(not isinstance(v.get_raw_value(), jax.core.Tracer) for v in variables)
    strategy.run(quick_step, args=(*ours, *batch))
    assert int(optimizer.step[...]) == 1


def test_a_step_that_fails_without_a_strategy():
    count = nnx.Variable(jnp.int32(0))

    def failing():
        count[...] += 1
        raise KeyError("at the end")

    for fn in (failing, rx.function(failing)):
        with pytest.raises(KeyError, match="at the end"):
            rx.get_strategy().run(fn)
        assert int(count[...]) == 0


def test_the_last_replica_fails(two):
    ours = made()
    before = numbers(*ours)

    def failing(x, y):
        quick_step(*ours, x, y)
        if rx.get_replica_context().replica_id_in_sync_group == 1:
            raise KeyError("only here")

    (batch,) = shared(two, (X, Y))
    with pytest.raises(KeyError, match="only here"):
        two.run(failing, args=batch)
    np.testing.assert_equal(numbers(*ours), before)


@over("mirrored 2")
def test_a_last_partial_batch_counts_for_what_it_has(strategy):
    ours, expected = made(), made()
    rest = ROWS - 1
    elements = shared(strategy, (X, Y), (X[:rest], Y[:rest]))

    @rx.function
    def train(batch):
        return strategy.run(quick_step, args=(*ours, *batch))

    for element, count in zip(elements, (ROWS, rest), strict=True):
        train(element)
        plain_step(*expected, X[:count], Y[:count])
    same(ours, expected)
    assert int(ours[2].loss.count[...]) == ROWS + rest


def test_uneven_shares_are_one_program(two):
    """Dropout and statistics of a replica's own, a variant for each number of rows."""
    results, calls = [], []

    def predict(model, x):
        calls.append(1)
        return model(x)

    for wrap in (lambda fn: fn, rx.function):
        with two.scope():
            model = Model(norm=True, rate=0.5)
        calls.clear()
        compiled = wrap(predict)
        for _ in range(2):
            rows = two.run(compiled, args=(model, per_replica(two, [X[:3], X[3:5]])))
        results.append((two.gather(rows, axis=0), numbers(model)))
    assert compiled.tracing_count == 1
    assert len(calls) == 4, "two passes of two variants"
    (eager_rows, eager), (rows, ours) = results
    equal(rows, eager_rows)
    for name, value in ours.items():
        np.testing.assert_allclose(value, eager[name], rtol=1e-5, atol=1e-6, err_msg=name)


@over("mirrored 2")
def test_a_function_around_run_sees_what_it_does(strategy):
    ours = made()
    _, optimizer, metrics = ours

    @rx.function
    def train(batch):
        metrics.reset()
        strategy.run(step, args=(*ours, *batch))
        seen = metrics.loss.compute()
        strategy.run(step, args=(*ours, *batch))
        optimizer.step[...] += 10
        return seen, metrics.loss.compute(), metrics.loss.count[...]

    (batch,) = shared(strategy, (X, Y))
    losses = []
    for _ in range(2):
        first, both, count = train(batch)
        losses += [float(first), 2 * float(both) - float(first)]
        assert int(count) == 2 * ROWS
    expected = made()
    wanted = []
    for _ in range(4):
        expected[2].reset()
        plain_step(*expected, X, Y)
        wanted.append(float(expected[2].loss.compute()))
    equal(losses, wanted, 1e-4)
    assert int(optimizer.step[...]) == 24
    assert train.tracing_count == 1


@over("mirrored 2")
def test_a_step_compiled_by_nnx_can_be_part_of_a_program(strategy):
    ours, expected = made(rate=0.5), made(rate=0.5)

    @rx.function
    def train(batch):
        return strategy.run(plain_step, args=(*ours, *batch))

    (batch,) = shared(strategy, (X, Y))
    keys = jax.random.key_data(ours[0].dropout.rngs.key[...])
    for _ in range(2):
        train(batch)
        plain_step(*expected, X, Y)
    equal(ours[1].step[...], 2)
    equal(ours[0].dropout.rngs.count[...], expected[0].dropout.rngs.count[...])
    equal(jax.random.key_data(ours[0].dropout.rngs.key[...]), keys)
    with pytest.raises(rx.errors.MeetingInTrace, match="all_reduce"):
        strategy.run(plain_step, args=(*ours, *batch))


@over("mirrored 2")
def test_gradients_may_be_applied_across_replicas(strategy, execution):
    ours, expected = made(), made()
    model, optimizer, _ = ours

    def loss_fn(model, x, y):
        return ((model(x) - y) ** 2).sum() / ROWS

    def apply(strategy, gradients):
        sums = jax.tree.map(lambda g: strategy.reduce("SUM", g, axis=None), gradients)
        optimizer.update(model, sums)

    def by_hand(x, y):
        gradients = nnx.jit(nnx.grad(loss_fn))(model, x, y)
        before = model.first.kernel[...]
        rx.get_replica_context().merge_call(apply, args=(gradients,))
        return jnp.abs(model.first.kernel[...] - before).sum()

    (batch,) = shared(strategy, (X, Y))
    changed = strategy.run(by_hand, args=batch)
    assert float(strategy.reduce("SUM", changed, axis=None)) > 0  # and a replica sees it
    plain_step(*expected, X, Y)
    same(ours[:2], expected[:2])


class Tied(nnx.Module):
    """One layer in two places, and one that is not used."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.once = self.again = nnx.Linear(4, 4, rngs=rngs)
        self.unused = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.again(self.once(x)).sum(axis=1, keepdims=True)


@over("mirrored 2")
def test_shared_and_unused_layers(strategy):
    def trained():
        model = Tied()
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param), nnx.metrics.Average()

    ours, expected = trained(), trained()
    compiled = rx.function(step)
    for batch in shared(strategy, (X, Y), (X, Y)):
        strategy.run(compiled, args=(*ours, *batch))
        plain_step(*expected, X, Y)
    same(ours, expected)
    assert ours[0].once is ours[0].again


def test_many_steps_by_one_call(two):
    ours, expected = made(), made()
    iterator = iter(two.experimental_distribute_dataset([(X, Y)] * 3))

    @rx.function
    def steps(context, batch):
        two.run(step, args=(*ours, *batch))

    with pytest.warns(DeprecationWarning, match="is deprecated, here as in the reference"):
        two.extended.experimental_run_steps_on_iterator(steps, iterator, 3)
    for _ in range(3):
        plain_step(*expected, X, Y)
    same(ours, expected)


def test_line_searches_are_refused_and_plateaus_see_the_whole_loss(two):
    weight = nnx.Param(jnp.float32(1.0))
    holder = nnx.Dict(weight=weight)
    optimizer = nnx.Optimizer(holder, optax.sgd(0.1), wrt=nnx.Param)

    def search():
        gradients = nnx.grad(lambda m: m.weight[...] ** 2)(holder)
        optimizer.update(holder, gradients, value_fn=lambda w: w)

    with pytest.raises(rx.errors.InvalidArgument, match="line search"):
        two.run(search)
    seen = []

    def noting(updates, state, params=None, *, value, **extra):
        seen.append(float(value))
        return updates, state

    transformation = optax.GradientTransformationExtraArgs(lambda p: (), noting)
    noted = nnx.Optimizer(holder, transformation, wrt=nnx.Param)

    def told():
        gradients = nnx.grad(lambda m: m.weight[...] ** 2)(holder)
        noted.update(holder, gradients, value=jnp.float32(1.5))

    two.run(told)
    assert seen == [3.0, 3.0]


def test_settings_of_the_thread_hold_for_all_replicas(two):
    def modes():
        rx.get_replica_context().all_reduce("SUM", 1.0)
        return nnx.set_graph_mode.current_value()

    with nnx.set_graph_mode(False):
        assert two.run(modes) is False
    assert two.run(modes) is True


def test_a_run_inside_of_somebody_elses_program_is_refused(two):
    line = nnx.Linear(4, 1, rngs=nnx.Rngs(0))

    @nnx.jit
    def outer(line, x):
        return two.run(lambda: line(x))

    with pytest.raises(rx.errors.InvalidType, match=r"tracer.*rx\.function"):
        outer(line, X)
    equal(rx.get_strategy().run(functools.partial(line, X)), line(X))
