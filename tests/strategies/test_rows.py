"""Batches that are plain arrays, and meshes that the user has set."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import cpus
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import replicax as rx

ROWS = np.arange(64 * 3, dtype=np.float32).reshape(64, 3)


def even_shares(rows: int, replicas: int) -> list[int]:
    return [rows // replicas + (replica < rows % replicas) for replica in range(replicas)]


@pytest.mark.parametrize("rows", [24, 7, 1])
def test_rows_are_divided_in_order_as_those_of_a_dataset(strategy, execution, rows):
    batch = {"x": ROWS[:rows], "y": np.arange(rows)}
    divided = strategy.split(batch)
    result = strategy.run(lambda batch: batch["y"] * 2, args=(divided,))
    whole = strategy.gather(result, axis=0)
    np.testing.assert_array_equal(whole, np.arange(rows) * 2)
    shares = even_shares(rows, strategy.num_replicas_in_sync)
    local = strategy.extended.topology.local_replicas
    sizes = [len(part) for part in strategy.experimental_local_results(divided["x"])]
    assert sizes == [shares[replica] for replica in local]


@pytest.mark.parametrize("rows", [24, 7])
def test_rows_are_divided_in_a_compiled_function_too(strategy, rows):
    @rx.function
    def total(batch):
        result = strategy.run(lambda rows: rows.sum(axis=0), args=(strategy.split(batch),))
        return strategy.reduce("SUM", result, axis=None)

    np.testing.assert_allclose(total(jnp.asarray(ROWS[:rows])), ROWS[:rows].sum(axis=0))


def test_what_has_no_rows_is_refused(two):
    with pytest.raises(rx.errors.InvalidType, match=r"divides the rows of arrays.*'text'"):
        two.split("text")
    with pytest.raises(rx.errors.InvalidType, match="PerReplica"):
        two.split(two.split(ROWS))
    with pytest.raises(rx.errors.ShapeMismatch, match="without rows"):
        two.split({"x": ROWS, "rate": 0.1})
    with pytest.raises(rx.errors.ShapeMismatch, match="different numbers of rows"):
        two.split((ROWS, ROWS[:3]))
    with pytest.raises(RuntimeError, match="cross-replica"):
        two.run(lambda: two.split(ROWS))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("how", ["eager", "compiled", "in a function"])
def test_an_array_that_lies_over_the_replicas_is_taken_apart_by_its_shards(two, kind, how):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(kind,))
    array = jax.device_put(ROWS, NamedSharding(mesh, PartitionSpec("data")))

    def replica_fn(rows):
        return rows.sum(axis=0)

    run = {
        "eager": lambda x: two.run(replica_fn, args=(x,)),
        "compiled": lambda x: two.run(rx.function(replica_fn), args=(x,)),
        "in a function": rx.function(lambda x: two.run(replica_fn, args=(x,))),
    }[how]
    first, second = run(array).values
    np.testing.assert_allclose(first, ROWS[:32].sum(axis=0))
    np.testing.assert_allclose(second, ROWS[32:].sum(axis=0))


@pytest.mark.parametrize("in_a_function", [False, True])
def test_a_whole_batch_for_every_replica_is_hinted_at_once(in_a_function):
    strategy = rx.MirroredStrategy(cpus(4))

    def call(batch):
        return strategy.run(lambda batch: batch[0].sum(), args=(batch,))

    call = rx.function(call) if in_a_function else call
    with pytest.warns(rx.errors.PerformanceHint, match=r"Each of 4 replicas got all 64 rows"):
        result = call((ROWS, np.arange(64)))
    np.testing.assert_allclose(result.values, ROWS.sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call((ROWS, np.arange(64)))


def test_parameters_and_small_arrays_are_no_batches(two):
    params = {"kernel": jnp.ones((64, 8)), "bias": jnp.zeros(8)}
    two.run(lambda params, rate: params["kernel"].T * rate, args=(params, jnp.ones(64)))
    two.run(lambda x: x, args=(ROWS[:8],))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_that_is_set_does_not_matter(execution, kind):
    def trained(mesh):
        strategy = rx.MirroredStrategy(cpus(2))
        with strategy.scope():
            weight = rx.Variable(jnp.ones(3))
            optimizer = rx.Optimizer(optax.adam(0.1))

        def step(rows):
            loss = rx.value_and_grad(lambda: ((rows * weight) ** 2).sum() / 8, [weight])
            value, gradients = loss()
            optimizer.apply_gradients(zip(gradients, [weight], strict=True))
            return value

        def losses():
            for rows in (ROWS[:8], ROWS[8:16], ROWS[:7]):
                result = strategy.run(step, args=(strategy.split(rows),))
                yield float(strategy.reduce("SUM", result, axis=None))
            yield from (float(each) for each in strategy.experimental_local_results(result))

        if mesh is None:
            return [*losses(), *weight.numpy()]
        with jax.set_mesh(mesh):
            found = list(losses())
            weight.assign_add(jnp.zeros(3))
            return [*found, *weight.numpy()]

    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(kind,))
    assert trained(mesh) == trained(None)
    assert jax.sharding.get_abstract_mesh().empty
