"""`describe_variables`: the table of a strategy's variables."""

import copy
import gc
from dataclasses import FrozenInstanceError

import jax
import jax.numpy as jnp
import optax
import pytest
from conftest import cpus
from flax import nnx

import replicax as rx
from replicax.variables import storage_of


def described(strategy, *variables):
    """Return the rows of some variables, in the order of the table."""
    names = {variable.name for variable in variables}
    return [row for row in strategy.extended.describe_variables().rows if row.name in names]


def test_every_variable_is_described_as_devices_hold_it(strategy):
    with strategy.scope():
        weight = rx.Variable(jnp.ones((5, 4)), name="described/weight")
        count = rx.Variable(0, name="described/count", synchronization="ON_READ", aggregation="SUM")
        optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9), name="described")
        empty = rx.Variable(jnp.zeros((0, 3), jnp.bfloat16), name="described/empty")
    strategy.run(lambda: optimizer.apply_gradients([(jnp.ones((5, 4)), weight)]))
    made = [weight, count, empty, *optimizer.variables]
    assert len(made) == 5
    if strategy is rx.get_strategy():  # they belong to no strategy
        assert strategy.extended.describe_variables().rows == ()
        return
    rows = {row.name: row for row in described(strategy, *made)}
    assert {*rows} == {variable.name for variable in made}
    for variable in made:
        row, shard = rows[variable.name], storage_of(variable).lift(strategy.topology)
        assert (row.shape, row.dtype) == (variable.shape, variable.dtype)
        assert row.bytes_per_device == shard.addressable_shards[0].data.nbytes
        assert not row.adopted
    assert rows["described/weight"].bytes == 80
    table = strategy.extended.describe_variables()
    assert table.bytes_per_device == sum(row.bytes_per_device for row in table.rows)
    assert table.bytes == sum(row.bytes for row in table.rows)


def test_variables_are_in_the_table_as_long_as_they_live(two):
    with two.scope():
        first, second = rx.Variable(1.0, name="first"), rx.Variable(2.0, name="second")
        table = two.extended.describe_variables()
    copied = copy.deepcopy(first)
    assert len(first.values) == 2  # copies of a variable are no variables
    names = [row.name for row in two.extended.describe_variables().rows]
    assert names == ["first", "second", "first"]
    del first
    gc.collect()
    assert [row.name for row in described(two, second, copied)] == ["second", "first"]
    assert [row.name for row in table.rows] == ["first", "second"]
    with pytest.raises(FrozenInstanceError):
        table.rows = ()


def test_layouts_and_bytes():
    strategy = rx.FullyShardedStrategy(cpus(3))
    with strategy.scope():
        made = [
            rx.Variable(jnp.zeros((100, 301)), name="padded[bold]"),  # the name is no markup
            rx.Variable(jnp.zeros((300, 301), jnp.bfloat16), name="even"),
            rx.Variable(jnp.zeros(64), name="small"),
            rx.Variable(jnp.zeros(2), name="own", synchronization="ON_READ"),
            rx.Variable(jax.random.key(0), name="key"),
        ]
    table = strategy.extended.describe_variables()
    assert len(made) == len(table.rows)
    assert [(row.layout, row.parts) for row in table.rows] == [
        ("sharded", (1, 3)),
        ("sharded", (3, 1)),
        ("replicated", (1,)),
        ("per replica", (1,)),
        ("replicated", ()),
    ]
    assert [row.bytes for row in table.rows] == [120400, 180600, 256, 8, 8]
    # Of 301 columns, each replica has 101: two of all are padding.
    assert [row.bytes_per_device for row in table.rows] == [40400, 60200, 256, 8, 8]
    assert table.bytes_per_device == 100872
    lines = [" ".join(line.split()) for line in str(table).splitlines()]
    assert lines[0] == "5 variables"
    assert lines[3] == "padded[bold] (100, 301) float32 sharded, dim 1 in 3 117.6 KiB 39.45 KiB"
    assert lines[-1] == "in all 294.2 KiB 98.51 KiB"


def test_parts_over_logical_devices():
    strategy = rx.MirroredStrategy(cpus(4), logical_devices_per_replica=2)
    with strategy.scope(), strategy.extended.partition([1, 2]):
        weight = rx.Variable(jnp.zeros((4, 8)), name="weight")
    (row,) = described(strategy, weight)
    assert (row.layout, row.parts, row.bytes_per_device) == ("replicated", (1, 2), 64)


def test_one_copy_is_said_to_be_one():
    central = rx.experimental.CentralStorageStrategy(cpus(2), "CPU:3")
    with central.scope():
        weight = rx.Variable(jnp.zeros(4), name="weight")
    assert [row.layout for row in described(central, weight)] == ["one copy"]


def whole(shape, dtype):
    return [1] * len(shape)


class Flax(nnx.Module):
    def __init__(self):
        self.table = nnx.Param(jnp.ones((513, 257)))  # neither divides by two


@pytest.mark.parametrize("partitioner", [None, whole])
def test_state_that_is_kept_whole_is_hinted_at_once(partitioner):
    strategy = rx.FullyShardedStrategy(cpus(2), variable_partitioner=partitioner)
    with strategy.scope():
        weight = rx.Variable(jnp.ones((512, 512)), name="weight")
    model = Flax()
    strategy.run(lambda: model.table.sum() + weight.value.sum())
    with pytest.warns(rx.errors.PerformanceHint) as hints:
        rows = described(strategy, weight)
    assert [row.layout for row in rows] == ["sharded" if partitioner is None else "replicated"]
    message = str(hints.pop().message)
    assert "'model.table' (515 KiB, of Keras or Flax)" in message
    assert ("'weight' (1 MiB)" in message) == (partitioner is whole)
    assert ("33 %" if partitioner is None else "100 %") in message
    described(strategy, weight)  # a second hint would be an error


def test_small_and_divided_states_are_not_hinted_at(two):
    small = rx.FullyShardedStrategy(cpus(2), variable_partitioner=whole)
    divided = rx.FullyShardedStrategy(cpus(2))
    alone = rx.FullyShardedStrategy(cpus(1))
    for strategy, rows in ((small, 500), (divided, 512), (alone, 512), (two, 512)):
        with strategy.scope():
            weight = rx.Variable(jnp.zeros((rows, 512)), name="weight")
            bias = rx.Variable(jnp.zeros(64), name="bias")
        assert len(described(strategy, weight, bias)) == 2
