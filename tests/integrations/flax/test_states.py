"""BatchNorm, Dropout, metrics and own kinds of variables: what replicas see, and what is kept."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
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
from support import components_equal, equal, per_replica

import replicax as rx


@over("mirrored 2")
def test_batch_norm_of_equal_shares_equals_one_device(strategy, execution):
    # Every replica has the same rows, so that its statistics are those of the whole batch.
    rows = np.array([0, 1, 2, 3, 4, 5] * strategy.num_replicas_in_sync)
    batch = (X[rows], Y[rows])
    expected, ours = made(norm=True), made(norm=True)

    for element in shared(strategy, batch, batch):
        strategy.run(quick_step, args=(*ours, *element))
    for _ in range(2):
        plain_step(*expected, *batch)
    same(ours, expected)
    assert not np.allclose(ours[0].norm.mean[...], 0)


@over("mirrored 3")
def test_batch_norm_over_the_axis_of_replicas_sees_the_whole_batch(strategy):
    expected, ours = made(norm=True), made(norm=True, axis_name="replica")
    compiled = rx.function(step)
    for element in shared(strategy, (X, Y), (X, Y)):
        strategy.run(compiled, args=(*ours, *element))
    for _ in range(2):
        plain_step(*expected, X, Y)
    same(ours, expected)


def test_the_axis_of_replicas_is_there_in_programs_only(two):
    model = Model(norm=True, axis_name="replica")
    before = numbers(model)
    with pytest.raises(NameError, match="replica") as caught:
        two.run(model, args=(X,))
    assert any("axis_name='replica'" in note for note in caught.value.__notes__)
    np.testing.assert_equal(numbers(model), before)


@over("mirrored 1", "mirrored 2")
def test_dropout_of_the_first_replica_is_that_of_one_device(strategy, execution):
    ours, plain = (nnx.Dropout(0.5, rngs=nnx.Rngs(3)) for _ in range(2))
    ones = np.ones((ROWS, 4), np.float32)
    compiled = nnx.jit(lambda model, x: model(x))

    def forward(x):
        return compiled(ours, x)

    for _ in range(2):
        expected = compiled(plain, ones)
        parts = strategy.experimental_local_results(strategy.run(forward, args=(ones,)))
        for replica, part in zip(strategy.topology.local_replicas, parts, strict=True):
            assert np.allclose(part, expected, atol=1e-6) == (replica == 0)
    same((ours,), (plain,))
    ours.eval()
    plain.eval()
    for part in strategy.experimental_local_results(strategy.run(forward, args=(ones,))):
        equal(part, compiled(plain, ones))


@over("mirrored 2")
def test_metrics_count_what_all_replicas_have_seen(strategy, execution):
    replicas = strategy.num_replicas_in_sync
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), spread=nnx.metrics.Welford())
    expected = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), spread=nnx.metrics.Welford())
    logits = np.linspace(-3, 7, 12 * 3, dtype=np.float32).reshape(12, 3) ** 2 % 5
    labels = np.arange(12, dtype=np.int32) % 3
    values = 100 + np.arange(12, dtype=np.float32) ** 2

    def seen(logits, labels, values):
        metrics.update(logits=logits, labels=labels, values=values)

    def seen_anew(logits, labels, values):
        metrics.reset()
        metrics.update(logits=logits, labels=labels, values=values)

    def equals_plain():
        same((metrics,), (expected,))
        statistics, wanted = metrics.compute()["spread"], expected.compute()["spread"]
        equal(statistics.standard_deviation, wanted.standard_deviation, 1e-5)

    assert 12 % replicas == 0
    first, second, third = shared(strategy, *[(logits, labels, values + i) for i in range(3)])
    strategy.run(seen, args=first)
    strategy.run(seen, args=second)
    expected.update(logits=logits, labels=labels, values=values)
    expected.update(logits=logits, labels=labels, values=values + 1)
    equals_plain()
    strategy.run(seen_anew, args=third)
    expected.reset()
    expected.update(logits=logits, labels=labels, values=values + 2)
    equals_plain()
    metrics.reset()
    expected.reset()
    strategy.run(seen, args=first)
    expected.update(logits=logits, labels=labels, values=values)
    equals_plain()


class Kept(nnx.Variable):
    """A kind of its own."""


class Counts(nnx.Module):
    def __init__(self):
        self.sum = nnx.Variable(jnp.float32(10.0), aggregation="SUM")
        self.first = nnx.Variable(jnp.float32(10.0), aggregation="ONLY_FIRST_REPLICA")
        self.mean = Kept(jnp.float32(10.0))
        self.calls = Kept(jnp.int32(10))
        self.nest = Kept({"a": jnp.float32(0.0), "b": (jnp.int32(0), "name")})
        self.key = Kept(jax.random.key(7))


@over("mirrored 2")
def test_own_kinds_of_variables_say_how_they_are_combined(strategy, execution):
    counts = Counts()
    replicas = strategy.num_replicas_in_sync

    def add(x):
        read = counts.sum[...]
        counts.sum[...] += x
        counts.first[...] += x
        counts.mean[...] += x
        counts.calls[...] += 1
        counts.nest["a"] = counts.nest["a"] + x
        counts.key[...] = jax.random.split(counts.key[...])[0]
        return read

    value = per_replica(strategy, [1.0 + replica for replica in range(replicas)])
    components_equal(strategy, strategy.run(add, args=(value,)), [10.0] * replicas)
    total = sum(range(1, replicas + 1))
    equal(counts.sum[...], 10.0 + total)
    equal(counts.first[...], 11.0)
    equal(counts.mean[...], 10.0 + total / replicas)
    assert int(counts.calls[...]) == 11
    equal(counts.nest["a"], total / replicas)
    assert counts.nest["b"][1] == "name"
    assert counts.key[...] == jax.random.split(jax.random.key(7))[0]


def test_variables_that_cannot_be_shared_are_refused(two):
    for kind in ("ref", "hijax"):
        with nnx.var_defaults(**{kind: True}):
            kept_by_reference = nnx.Param(jnp.zeros(2))
        step = functools.partial(lambda variable: variable[...], kept_by_reference)
        with pytest.raises(rx.errors.InvalidType, match=f"`{kind}` reference"):
            two.run(step)
    cache = nnx.Cache(jnp.zeros(()))

    def write():
        cache[...] += 1

    with pytest.raises(rx.errors.InvalidArgument, match="'cache', a Cache, was changed by 2"):
        two.run(write)
    equal(cache[...], 0.0)
    wrong = nnx.Variable(jnp.zeros(()), aggregation="MEDIAN")
    with pytest.raises(rx.errors.InvalidArgument, match="MEDIAN"):
        two.run(lambda: wrong[...])
