"""Reading and writing some elements of a variable."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import equal

import replicax as rx

START = np.arange(12, dtype=np.float32).reshape(4, 3)
ROWS, VALUES = [2, 0], np.float32([[100, 100, 100], [-200, -200, -200]])
PLACES, NUMBERS = [[1, 2], [3, 0]], np.float32([100, -200])


def changed(how, index, values):
    expected = START.copy()
    if how in ("max", "min"):
        expected[index] = getattr(np, f"{how}imum")(expected[index], values)
    else:
        expected[index] = {
            "add": expected[index] + values,
            "sub": expected[index] - values,
            "update": values,
        }[how]
    return expected


def make(strategy, **options):
    with strategy.scope():
        return rx.Variable(START, name="table", **options)


@pytest.mark.parametrize("how", ["add", "sub", "update", "max", "min"])
def test_rows_are_written_across_replicas(strategy, how):
    table = make(strategy)
    result = getattr(table, f"scatter_{how}")(rx.IndexedSlices(VALUES, ROWS))
    assert result is table
    equal(table.numpy(), changed(how, ROWS, VALUES))


@pytest.mark.parametrize("how", ["add", "sub", "update"])
def test_elements_are_written_across_replicas(strategy, how):
    table = make(strategy)
    getattr(table, f"scatter_nd_{how}")(PLACES, NUMBERS)
    equal(table.numpy(), changed(how, tuple(np.transpose(PLACES)), NUMBERS))


@pytest.mark.parametrize("how", ["add", "sub"])
def test_what_replicas_add_is_aggregated(strategy, execution, how):
    table = make(strategy, aggregation="SUM")
    sign = 1 if how == "add" else -1

    def replica_step(values):
        row = rx.get_replica_context().replica_id_in_sync_group % 4
        slices = rx.IndexedSlices(values, jnp.asarray(row)[None])
        getattr(table, f"scatter_{how}")(slices)
        return table.sparse_read([1])

    strategy.run(replica_step, args=(jnp.ones((1, 3), jnp.float32),))
    expected = START.copy()
    for replica in range(strategy.num_replicas_in_sync):
        expected[replica % 4] += sign
    equal(table.numpy(), expected)


def test_replicas_write_their_own_copies(strategy, execution):
    local = make(strategy, synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: local.scatter_update(rx.IndexedSlices(VALUES, ROWS)))
    for copy in local.values:
        equal(copy.numpy(), changed("update", ROWS, VALUES))


def test_replicas_set_rows_of_the_first_or_of_the_mean(strategy, execution):
    first = make(strategy, aggregation="ONLY_FIRST_REPLICA")
    mean = make(strategy, aggregation="MEAN")

    def replica_step():
        own = jnp.float32(rx.get_replica_context().replica_id_in_sync_group)
        for table in (first, mean):
            table.scatter_update(rx.IndexedSlices(jnp.full((1, 3), own), [1]))

    strategy.run(replica_step)
    equal(first.numpy(), changed("update", [1], 0.0))
    equal(mean.numpy(), changed("update", [1], (strategy.num_replicas_in_sync - 1) / 2))


def test_rows_of_a_sum_cannot_be_set_by_replicas(two, execution):
    table = make(two, aggregation="SUM")
    with pytest.raises(ValueError, match=r"sums what replicas write.*scatter_add"):
        two.run(lambda: table.scatter_update(rx.IndexedSlices(VALUES, ROWS)))
    equal(table.numpy(), START)


def test_reading(strategy, execution):
    table = make(strategy)
    equal(table.sparse_read([3, 3, 0]), START[[3, 3, 0]])
    equal(table.gather_nd([[1, 2], [3, 0]]), START[[1, 3], [2, 0]])
    equal(table.gather_nd([[1], [3]]), START[[1, 3]])
    rows = strategy.run(lambda: table.sparse_read([1]))
    for component in strategy.experimental_local_results(rows):
        equal(component, START[[1]])


def test_an_index_that_occurs_twice_counts_twice(two):
    table = make(two)
    table.scatter_add(rx.IndexedSlices(np.ones((2, 3), np.float32), [1, 1]))
    equal(table.numpy()[1], START[1] + 2)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda v: v.scatter_add(rx.IndexedSlices(VALUES, [4, 0])), "an index of 4 where 0 to 3"),
        (lambda v: v.scatter_nd_add([[0, -1]], NUMBERS[:1]), "an index of -1 where 0 to 2"),
        (lambda v: v.scatter_add(rx.IndexedSlices(VALUES[:1], ROWS)), r"shape \(2, 3\).*\(1, 3\)"),
        (lambda v: v.scatter_nd_update([[0, 0, 0]], [1.0]), "indices of 3 dimension"),
        (lambda v: v.scatter_nd_update(0, 1.0), "must have a last dimension"),
        (lambda v: v.scatter_update((VALUES, ROWS)), "must be an `rx.IndexedSlices`; got tuple"),
        (lambda v: v.scatter_add(rx.IndexedSlices(VALUES, [0.5, 1.0])), "must be whole numbers"),
        (lambda v: v.sparse_read([7]), "an index of 7"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(two, write, message):
    table = make(two)
    with pytest.raises(ValueError, match=message):
        write(table)
    equal(table.numpy(), START)


def test_whole_numbers_take_no_fractions(two):
    with two.scope():
        counts = rx.Variable([1, 2, 3])
    with pytest.raises(TypeError, match="has dtype int32; got updates of dtype float32"):
        counts.scatter_add(rx.IndexedSlices([0.5], [0]))
    counts.scatter_add(rx.IndexedSlices([5], [0]))
    equal(counts.numpy(), [6, 2, 3])


def test_elements_cannot_be_assigned_by_index_and_the_error_says_what_to_write(two):
    table = make(two)
    with pytest.raises(TypeError, match=r"variable.value.at\[index\].set\(value\)"):
        table[0] = 1.0
    for step in (lambda: table[0].assign_add(1.0), rx.function(lambda: table[0].assign_add(1.0))):
        with pytest.raises(AttributeError) as caught:
            two.run(step)
        assert "variable.value.at[index].add(value)" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray, list])
def test_indices_that_a_program_closes_over(two, array):
    table = make(two)
    rows, places = array([2, 0]), array([[1, 2], [3, 0]])
    for wrap in (rx.function, jax.jit):
        equal(wrap(lambda: table.sparse_read(rows))(), START[[2, 0]])
        equal(wrap(lambda: table.gather_nd(places))(), START[[1, 3], [2, 0]])
    outside = array([9])
    with pytest.raises(ValueError, match="an index of 9"):
        rx.function(lambda: table.sparse_read(outside))()
    with pytest.raises(ValueError, match=r"got shape \(2, 0\)"):
        table.gather_nd(np.zeros((2, 0), np.int32))
