"""Optimizers that a step rebuilds, makes or hands to `nnx.jit`, and states that go in and out."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import cpus
from flax_models import (
    ROWS,
    Model,
    X,
    Y,
    loss_fn,
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
from support import equal

import replicax as rx

TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))
_gradients = nnx.jit(nnx.grad(lambda model, x, y: loss_fn(model, x, y)[0]))


def by_jit():
    ours = made(TX)
    return ours, functools.partial(nnx.jit(step), *ours)


def by_cached_partial():
    ours = made(TX)
    return ours, nnx.cached_partial(nnx.jit(step), *ours)


def by_jit_of_a_part():
    ours = made(TX)
    update = nnx.jit(lambda model, optimizer, gradients: optimizer.update(model, gradients))

    def part(x, y):
        update(*ours[:2], _gradients(ours[0], x, y))

    return ours, part


def by_plain_jit():
    """The recipe of Flax's page on performance, except for the cached state."""
    ours = made(TX)

    @jax.jit
    def compiled(state, x, y):
        objects = nnx.merge(graph, state)
        step(*objects, x, y)
        return nnx.state(objects)

    graph = nnx.graphdef(ours)
    return ours, lambda x, y: nnx.update(ours, compiled(nnx.state(ours), x, y))


def by_merging():
    ours = made(TX)

    def merging(x, y):
        objects = nnx.merge(*nnx.split(ours))
        quick_step(*objects, x, y)
        nnx.update(ours, nnx.state(objects))

    return ours, merging


def by_making_one():
    ours = made(TX)
    model, optimizer, _ = ours

    def making(x, y):
        again = nnx.Optimizer(model, optimizer.tx, wrt=nnx.Param)  # whose `tx` sums already
        nnx.update(again, nnx.state(optimizer))
        again.update(model, _gradients(model, x, y))
        nnx.update(optimizer, nnx.state(again))

    return ours, making


def by_model_and_optimizer():
    model, _, metrics = made()
    both = nnx.ModelAndOptimizer(model, TX)
    return (model, both, metrics), lambda x, y: both.update(_gradients(both.model, x, y))


class Calling(nnx.Optimizer):
    """Has an `update` that does more, by calling that of Flax."""

    def update(self, model: Any, grads: Any) -> Any:
        return super().update(model, jax.tree.map(lambda gradient: gradient * 1.0, grads))


class Replacing(nnx.Optimizer):
    """Has an `update` of its own."""

    def update(self, model: Any, grads: Any) -> Any:
        params = nnx.as_pure(nnx.state(model, self.wrt))
        updates, state = self.tx.update(nnx.as_pure(grads), nnx.as_pure(self.opt_state), params)
        nnx.update(model, optax.apply_updates(params, updates))
        nnx.update(self.opt_state, nnx.state(state))
        self.step[...] += 1


def by_a_subclass(kind):
    def by():
        model, _, metrics = made()
        optimizer = kind(model, TX, wrt=nnx.Param)
        return (model, optimizer, metrics), lambda x, y: optimizer.update(
            model, _gradients(model, x, y)
        )

    return by


COMPILED_BY_NNX = (by_jit, by_cached_partial, by_jit_of_a_part, by_plain_jit)
WAYS = {
    **{way.__name__: way for way in COMPILED_BY_NNX},
    **{way.__name__: way for way in (by_merging, by_making_one, by_model_and_optimizer)},
    "by_a_subclass_that_calls": by_a_subclass(Calling),
    "by_a_subclass_of_its_own": by_a_subclass(Replacing),
}


@functools.cache
def on_one_device():
    expected = made(TX)
    for _ in range(3):
        plain_step(*expected, X, Y)
    return expected


def trained_parts(objects):
    """Return the state of a model and its optimizer, which is the same in all variants."""
    return nnx.Dict(model=objects[0]), nnx.Dict(
        state=nnx.data(objects[1].opt_state), step=objects[1].step
    )


@pytest.mark.parametrize("outside", [False, True], ids=["run(function)", "function(run)"])
@pytest.mark.parametrize("way", WAYS)
@over("mirrored 2")
def test_compiled_steps_sum_gradients(strategy, way, outside):
    ours, fn = WAYS[way]()

    @rx.function
    def train(x, y):
        strategy.run(fn, args=(x, y))

    compiled = rx.function(fn)
    for batch in shared(strategy, *[(X, Y)] * 3):
        train(*batch) if outside else strategy.run(compiled, args=batch)
    same(trained_parts(ours), trained_parts(on_one_device()))
    assert (train if outside else compiled).tracing_count == 1
    assert vars(ours[1])["tx"] is ours[1].tx is TX


@pytest.mark.parametrize("way", WAYS)
def test_eager_steps_sum_gradients_or_say_what_to_use(two, way):
    ours, fn = WAYS[way]()
    before = numbers(*ours)
    batches = shared(two, *[(X, Y)] * 3)
    if WAYS[way] in COMPILED_BY_NNX:
        with pytest.raises(rx.errors.MeetingInTrace, match=r"Use `rx.function\(step\)` instead"):
            two.run(fn, args=batches[0])
        np.testing.assert_equal(numbers(*ours), before)
        return
    for batch in batches:
        two.run(fn, args=batch)
    same(trained_parts(ours), trained_parts(on_one_device()))


def test_a_last_partial_batch_counts_for_what_it_has(two):
    ours, fn = by_merging()
    expected, rest = made(TX), ROWS - 1
    compiled = rx.function(fn)
    for batch, count in zip(shared(two, (X, Y), (X[:rest], Y[:rest])), (ROWS, rest), strict=True):
        two.run(compiled, args=batch)
        plain_step(*expected, X[:count], Y[:count])
    same(trained_parts(ours), trained_parts(expected))


def test_what_nnx_has_compiled_elsewhere_is_compiled_anew(two):
    """The same shapes on one device, on two replicas and on four; only replicas sum."""
    four = rx.MirroredStrategy(cpus(4))
    compiled = nnx.jit(step)
    share = ROWS // 2
    once, twice, again, fourfold = (made(optax.sgd(0.1)) for _ in range(4))
    compiled(*once, X[:share], Y[:share])
    with pytest.raises(rx.errors.MeetingInTrace, match=r"rx\.function"):
        two.run(compiled, args=(*twice, X[:share], Y[:share]))
    (batch,) = shared(two, (X, Y))
    two.run(rx.function(compiled), args=(*twice, *batch))
    both = np.concatenate([X, X]), np.concatenate([Y, Y])
    (batch,) = shared(four, both)
    four.run(rx.function(compiled), args=(*fourfold, *batch))
    compiled(*again, X[:share], Y[:share])
    same(again, once)
    for ours, batch in ((twice, (X, Y)), (fourfold, both)):
        expected = made(optax.sgd(0.1))
        plain_step(*expected, *batch)
        same(ours, expected)


def test_a_rebuilt_optimizer_has_the_users_transformation(two):
    """Replicas see no object that an optimizer holds, so that no gradient is summed twice."""
    ours = made(TX)
    graphs = []

    def split(x, y):
        graph, state = nnx.split(ours)
        graphs.append(graph)
        quick_step(*nnx.merge(graph, state), x, y)

    (batch,) = shared(two, (X, Y))
    two.run(split, args=batch)
    two.run(rx.function(split), args=batch)
    assert all(graph == nnx.graphdef(ours) for graph in graphs)
    optimizer = ours[1]
    assert optimizer.tx is TX
    del optimizer.tx
    assert not hasattr(optimizer, "tx")
    optimizer.tx = TX
    assert nnx.clone(optimizer).tx is TX


def functional(graph, state, x, y):
    """A step that gets and returns what it changes."""
    objects = nnx.merge(graph, state)
    quick_step(*objects, x, y)
    return nnx.state(objects)


@pytest.mark.parametrize(
    ("replicas", "wrap"),
    [(2, lambda fn: fn), (2, rx.function), (4, rx.function)],
    ids=["2, eager", "2, compiled", "4, compiled"],
)
def test_states_that_go_in_and_out_equal_one_device(replicas, wrap):
    strategy = rx.MirroredStrategy(cpus(replicas))
    ours, fn = made(TX), wrap(functional)
    graph, state = nnx.split(ours)
    for batch in shared(strategy, *[(X, Y)] * 3):
        state = strategy.run(fn, args=(graph, state, *batch))
    for part in strategy.experimental_local_results(state):
        nnx.update(ours, part)
        same(trained_parts(ours), trained_parts(on_one_device()))


def test_statistics_in_such_states_are_those_of_each_replica(two):
    """Nobody knows that they are statistics, or keys: they are the user's arrays."""
    ours = made(norm=True, rate=0.5)
    graph, state = nnx.split(ours)
    (batch,) = shared(two, (X, Y))
    state = two.run(rx.function(functional), args=(graph, state, *batch))
    parts = two.experimental_local_results(state)
    for part, share in zip(parts, X.reshape(2, ROWS // 2, -1), strict=True):
        expected = 0.01 * ours[0].first(share).mean(axis=0)
        equal(part[0]["norm"]["mean"].get_value(), expected, 1e-5)
    first, second = (part[0]["dropout"]["rngs"]["key"].get_value() for part in parts)
    equal(jax.random.key_data(first), jax.random.key_data(second))


def test_statistics_and_keys_can_be_brought_together_by_hand(two):
    graph, state = nnx.split((model := Model(norm=True, rate=0.5),))
    ones = jnp.ones((ROWS, 6))

    @rx.function
    def forward(state, x):
        (model,) = nnx.merge(graph, state)
        context = rx.get_replica_context()
        model(x)
        key = model.dropout.rngs.key
        key[...] = jax.random.fold_in(key[...], context.replica_id_in_sync_group)
        nnx.update(model, context.all_reduce("MEAN", nnx.state(model, nnx.BatchStat)))
        return nnx.state(model, nnx.BatchStat), model.dropout(ones)

    ((x, _),) = shared(two, (X, Y))
    statistics, masked = two.run(forward, args=(state, x))
    for part in two.experimental_local_results(statistics):
        equal(part["norm"]["mean"].get_value(), 0.01 * model.first(X).mean(axis=0), 1e-5)
    first, second = two.experimental_local_results(masked)
    assert (np.asarray(first) != np.asarray(second)).any()


def test_statistics_over_the_axis_of_replicas_equal_one_device(two):
    ours, expected = made(norm=True, axis_name="replica"), made(norm=True)
    graph, state = nnx.split(ours)
    compiled = rx.function(functional)
    for batch in shared(two, (X, Y), (X, Y)):
        state = two.run(compiled, args=(graph, state, *batch))
        plain_step(*expected, X, Y)
    for part in two.experimental_local_results(state):
        nnx.update(ours, part)
        same(ours[:2], expected[:2])


def test_dropout_of_replicas_differs_and_is_reproducible(two):
    """Masks are drawn by keys that each replica has for itself."""

    def trained():
        ours = made(rate=0.5)
        ones = jnp.ones((ROWS, 6))

        @rx.function
        def train(x, y):
            step(*ours, x, y)
            return ours[0].dropout(ones)

        masks = [
            two.experimental_local_results(two.run(train, args=batch))
            for batch in shared(two, (X, Y), (X, Y))
        ]
        return np.array(masks) > 0, numbers(*ours)

    masks, after = trained()
    flat = masks.reshape(4, -1)  # two steps on two replicas
    assert all(0.25 < row.mean() < 0.75 for row in flat)
    assert all((flat[i] != flat[j]).any() for i in range(4) for j in range(i))
    np.testing.assert_equal(trained(), (masks, after))


def test_one_replica_may_search_along_a_line():
    """It sees the whole batch; for several, searches are refused."""
    strategy = rx.MirroredStrategy(cpus(1))
    tx = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))

    def search(model, optimizer, x, y):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def value_fn(params):
            return loss_fn(nnx.merge(graph, params, rest), x, y)[0]

        value, gradients = jax.value_and_grad(value_fn)(params)
        optimizer.update(model, gradients, grad=gradients, value=value, value_fn=value_fn)

    ours, expected = ((model := Model(), nnx.Optimizer(model, tx, wrt=nnx.Param)) for _ in range(2))
    strategy.run(rx.function(search), args=(*ours, X, Y))
    nnx.jit(search)(*expected, X, Y)
    same(ours, expected)
