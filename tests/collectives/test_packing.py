"""Arrays that are reduced together, in a program: as if each were reduced alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

MANY = 20  # more than a program states the places of


@pytest.fixture
def two():
    return rx.MirroredStrategy(["CPU:0", "CPU:1"])


def arrays_of(count, dtype=np.float32, shape=(3, 2)):
    random = np.random.default_rng(0)
    shapes = [shape if index % 2 else shape[1:] for index in range(count)]
    return [random.normal(size=each).astype(dtype) for each in shapes]


def reduced(strategy, arrays, options=None, op="SUM"):
    """Reduce over the replicas what each multiplies by its number plus one, in one program."""

    @rx.function
    def step(arrays):
        def replica(arrays):
            context = rx.get_replica_context()
            factor = context.replica_id_in_sync_group + 1
            return context.all_reduce(op, [a * factor.astype(a.dtype) for a in arrays], options)

        return strategy.run(replica, args=(arrays,))

    return jax.tree.map(np.asarray, rx.first(step(arrays)))


@pytest.mark.parametrize("count", [1, 2, 8, 9, MANY])
@pytest.mark.parametrize("dtype", [np.float32, np.int32, jnp.bfloat16])
def test_every_array_is_summed_by_itself(two, count, dtype):
    arrays = [np.asarray(np.round(array * 4), dtype) for array in arrays_of(count)]
    for total, array in zip(reduced(two, arrays), arrays, strict=True):
        np.testing.assert_array_equal(total, array * 3)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_where_it_is(two, number):
    arrays = arrays_of(MANY)
    arrays[0][0] = number
    for total, array in zip(reduced(two, arrays), arrays, strict=True):
        np.testing.assert_allclose(total, array * 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "choose"), [(rx.ReduceOp.MAX, np.maximum), (rx.ReduceOp.MIN, np.minimum)]
)
def test_the_largest_and_smallest_of_every_array(two, op, choose):
    arrays = [*arrays_of(MANY), *arrays_of(2, np.int32), *arrays_of(2, shape=(200, 300))]
    arrays[0][0] = np.nan
    for chosen, array in zip(reduced(two, arrays, op=op), arrays, strict=True):
        np.testing.assert_array_equal(chosen, choose(array, array * 2))


def test_large_arrays_among_small_ones(two):
    arrays = [*arrays_of(MANY), *arrays_of(2, shape=(200, 300))]
    options = rx.experimental.CommunicationOptions(bytes_per_pack=2**20)
    for total, array in zip(reduced(two, arrays, options), arrays, strict=True):
        np.testing.assert_allclose(total, array * 3, rtol=1e-6)


def test_a_sum_of_many_is_differentiated_as_each_would_be(two):
    arrays = arrays_of(MANY)

    def gradients(packed):
        @rx.function
        def step():
            def replica():
                context = rx.get_replica_context()

                def loss(arrays):
                    lists = [arrays] if packed else [[array] for array in arrays]
                    totals = [t for each in lists for t in context.all_reduce("SUM", each)]
                    return sum((total**2).sum() for total in totals)

                return jax.grad(loss)(arrays)

            return two.run(replica)

        return jax.tree.map(np.asarray, rx.first(step()))

    for together, alone in zip(gradients(True), gradients(False), strict=True):
        np.testing.assert_allclose(together, alone, rtol=1e-6)


def test_parameters_that_were_updated_by_packed_sums_are_common(two):
    """Values that are equal on all replicas by construction stay known as such after packing."""
    params = arrays_of(MANY)

    @rx.function
    def step(params, x):
        def replica(params, x):
            gradients = [param * x for param in params]
            means = rx.get_replica_context().all_reduce("MEAN", gradients)
            return [param - mean for param, mean in zip(params, means, strict=True)]

        return two.run(replica, args=(params, x))

    x = two.split(np.array([1.0, 3.0], np.float32))
    updated = step([jnp.asarray(param) for param in params], x)
    assert all(value.common is not None for value in updated)
    for new, old in zip(rx.first(updated), params, strict=True):
        np.testing.assert_allclose(new, -old, rtol=1e-6)
