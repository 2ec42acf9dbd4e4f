"""Collectives that not all replicas would reach are refused before the program runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

ROWS = np.float32([[0], [1], [2], [3]])


def total(x):
    return rx.get_replica_context().all_reduce("SUM", x)


def in_cond(x):
    return jax.lax.cond(jnp.sum(x) > 2, lambda: total(x), lambda: x)


def in_switch(x):
    return jax.lax.switch(jnp.int32(x[0, 0]), [lambda: x, lambda: x, lambda: total(x)])


def in_loop(x):
    return jax.lax.while_loop(lambda y: jnp.sum(y) < 10, lambda y: total(y) + 1, x)


def by_replica_id(x):
    first = rx.get_replica_context().replica_id_in_sync_group == 0
    return jax.lax.cond(first, lambda: total(x), lambda: x)


def in_jit_in_scan(x):
    step = jax.jit(lambda y: jax.lax.cond(jnp.sum(y) > 2, total, lambda y: y, y))
    return jax.lax.scan(lambda y, _: (step(y), None), x, length=2)[0]


DIVERGENT = [in_cond, in_switch, in_loop, by_replica_id, in_jit_in_scan]


@pytest.mark.parametrize("fn", DIVERGENT, ids=lambda fn: fn.__name__)
def test_a_condition_of_the_replicas_own_around_a_collective_is_refused(two, fn):
    with two.scope():
        steps = rx.Variable(0, aggregation="ONLY_FIRST_REPLICA")

    def step(x):
        steps.assign_add(1)
        return fn(x)

    with pytest.raises(rx.errors.CollectiveMismatch, match="may differ between the replicas") as e:
        two.run(rx.function(step), args=(two.split(ROWS),))
    assert "all_reduce" in str(e.value)
    assert f"{__file__}:" in str(e.value)
    assert int(steps.value) == 0


def decided_together(x):
    some = total((jnp.sum(x) > 2).astype(jnp.int32))
    return jax.lax.cond(some > 0, lambda: total(x), lambda: x)


def loop_decided_together(x):
    return jax.lax.while_loop(lambda y: jnp.max(total(y)) < 40, lambda y: total(y) + 1, x)


def without_a_collective(x):
    return jax.lax.cond(jnp.sum(x) > 2, lambda: x * 2, lambda: x) + total(x)


@pytest.mark.parametrize(
    "fn",
    [decided_together, loop_decided_together, without_a_collective],
    ids=lambda fn: fn.__name__,
)
def test_what_replicas_decide_together_runs_as_it_does_one_by_one(two, fn):
    batch = two.split(ROWS)
    compiled = two.experimental_local_results(two.run(rx.function(fn), args=(batch,)))
    parts = np.split(ROWS, 2)
    both = sum(parts)
    expected = {
        decided_together: [both, both],
        loop_decided_together: _looped(parts),
        without_a_collective: [parts[0] + both, parts[1] * 2 + both],
    }[fn]
    np.testing.assert_allclose(np.asarray(compiled), expected)


def _looped(parts):
    while np.max(sum(parts)) < 40:
        parts = [sum(parts) + 1] * 2
    return parts


@pytest.mark.parametrize("accumulate", [True, False])
def test_a_condition_from_a_mirrored_variable_or_an_argument_is_the_same_for_all(two, accumulate):
    with two.scope():
        steps = rx.Variable(0, aggregation="ONLY_FIRST_REPLICA")

    def step(x, flag):
        steps.assign_add(1)
        ready = (steps.value % 2 == 0) if accumulate else flag
        return jax.lax.cond(ready, lambda: total(x), lambda: x)

    compiled = rx.function(step)
    for expected in (np.split(ROWS, 2), [sum(np.split(ROWS, 2))] * 2):
        flag = jnp.asarray(expected[0] is expected[1])
        result = two.run(compiled, args=(two.split(ROWS), flag))
        np.testing.assert_allclose(np.asarray(two.experimental_local_results(result)), expected)


@pytest.mark.parametrize("fn", DIVERGENT, ids=lambda fn: fn.__name__)
def test_a_single_replica_waits_for_no_other(fn):
    one = rx.MirroredStrategy(["CPU:0"])
    compiled = one.run(rx.function(fn), args=(ROWS + 2,))  # for which each of them is an identity
    np.testing.assert_allclose(compiled, ROWS + 2)


def test_the_condition_that_parts_the_replicas_is_named(two):
    def inner(y, flag):
        return jax.lax.cond(flag, total, lambda y: y, y)

    def step(x, flag):
        y = jax.lax.cond(flag, lambda: x, lambda: x + 1)  # the same way for all
        jax.lax.cond(jnp.sum(x) > 2, lambda: 1.0, lambda: 2.0)  # without a collective
        return jax.lax.cond(jnp.sum(y) > 2, inner, lambda y, _: y, y, flag)

    with pytest.raises(rx.errors.CollectiveMismatch) as caught:
        two.run(rx.function(step), args=(two.split(ROWS), jnp.asarray(True)))
    line = step.__code__.co_firstlineno + 3
    assert f"{__file__}:{line})" in str(caught.value)
