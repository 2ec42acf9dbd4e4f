"""State that a step takes and returns, as programs for plain JAX have it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import cpus

import replicax as rx

ROWS = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
TX = optax.adam(0.1)


def loss_of(params, rows):
    return ((rows @ params["w"] + params["b"]) ** 2).mean()


def new_state():
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    return params, TX.init(params)


def step(params, state, rows):
    loss, gradients = jax.value_and_grad(loss_of)(params, rows)
    loss, gradients = rx.get_replica_context().all_reduce("MEAN", (loss, gradients))
    updates, state = TX.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def on_one_device(steps):
    params, state = new_state()
    for _ in range(steps):
        loss, gradients = jax.value_and_grad(loss_of)(params, ROWS)
        updates, state = TX.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params, state, loss


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("how", ["eager", "compiled", "in a function"])
def test_state_that_is_returned_equals_one_device(replicas, how):
    strategy = rx.MirroredStrategy(cpus(replicas))
    function = rx.function(step)
    run = {
        "eager": lambda *args: strategy.run(step, args=args),
        "compiled": lambda *args: strategy.run(function, args=args),
        "in a function": rx.function(lambda *args: strategy.run(step, args=args)),
    }[how]
    params, state = new_state()
    rows = strategy.split(ROWS)
    for _ in range(3):
        params, state, loss = run(params, state, rows)
    expected = on_one_device(3)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6),
        rx.first((params, state, loss)),
        expected,
    )
    if how == "compiled":
        assert function.tracing_count == 1
    if how == "in a function":
        assert run.tracing_count == 1


def test_a_program_of_parameters_is_compiled_once(two):
    compiled = rx.function(step)
    params, state = new_state()
    count = []
    for _ in range(3):
        params, state, _ = two.run(compiled, args=(params, state, two.split(ROWS)))
        (program,) = compiled._programs._entries.values()
        count.append(program.jitted._cache_size())
    assert count == [1, 1, 1]


def test_results_that_are_equal_by_construction_are_usable_as_arrays(two):
    def replica_fn(scale, rows):
        context = rx.get_replica_context()
        total = context.all_reduce("SUM", rows.sum(axis=0))
        return {"same": total * scale, "own": rows.sum(axis=0), "loss": total.sum(), "n": scale}

    result = two.run(rx.function(replica_fn), args=(jnp.float32(2), two.split(ROWS)))
    expected = 2 * ROWS.sum(axis=0)
    same = result["same"]
    assert isinstance(same, rx.PerReplica)
    for value in (same, same + 0, 1 * same, jnp.asarray(same), np.asarray(same), *same.values):
        np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(jnp.sin(same), np.sin(expected), rtol=1e-4)
    np.testing.assert_allclose(same[1], expected[1], rtol=1e-6)
    assert same.shape == (3,)
    np.testing.assert_allclose(optax.tree.norm({"w": same}), np.linalg.norm(expected), rtol=1e-5)
    assert result["loss"].item() == float(result["loss"])
    assert not hasattr(same, "devices")
    assert float(result["loss"]) == pytest.approx(ROWS.sum(), rel=1e-5)
    assert f"{result['n']:.1f}" == "2.0"
    with pytest.raises(TypeError, match=r"strategy.reduce.*rx\.first"):
        float(result["own"])
    with pytest.raises(TypeError, match=r"strategy.reduce.*rx\.first"):
        result["own"].mean()
    # It is a per-replica value all the same.
    np.testing.assert_allclose(two.reduce("SUM", same, axis=None), 2 * expected, rtol=1e-6)
    np.testing.assert_allclose(two.gather(same, axis=0), np.tile(expected, 2), rtol=1e-6)
    assert len(two.experimental_local_results(same)) == 2
    again = two.run(rx.function(lambda x: x + 1), args=(same,))
    np.testing.assert_allclose(again, expected + 1, rtol=1e-6)
    captured = two.run(rx.function(lambda: same + 1))
    np.testing.assert_allclose(captured, expected + 1, rtol=1e-6)


def test_results_that_may_differ_are_not_taken_for_equal(two):
    counter = None
    with two.scope():
        counter = rx.Variable(
            0.0, synchronization=rx.VariableSynchronization.ON_READ, aggregation="SUM"
        )

    def replica_fn(key):
        context = rx.get_replica_context()
        number = jnp.float32(context.replica_id_in_sync_group)
        counter.assign_add(number)
        drawn = jax.random.uniform(jax.random.fold_in(key, context.replica_id_in_sync_group))
        chosen = jax.lax.cond(number > 0, lambda: 1.0, lambda: 2.0)
        return number, counter.value, drawn, chosen

    for value in two.run(rx.function(replica_fn), args=(jax.random.key(0),)):
        first, second = value.values
        assert float(first) != float(second)
        with pytest.raises(TypeError, match="one component per replica"):
            float(value)


def test_first_takes_one_replicas_values(two, execution):
    result = two.run(
        lambda: {"id": rx.get_replica_context().replica_id_in_sync_group + jnp.arange(2), "x": "a"}
    )
    first = rx.first(result)
    assert isinstance(first["id"], jax.Array)
    np.testing.assert_array_equal(first["id"], [0, 1])
    assert first["x"] == "a"
    np.testing.assert_array_equal(rx.first(rx.PerReplica((1, 2))), 1)
