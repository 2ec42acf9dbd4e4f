"""The examples of the reference pages that need neither datasets, workers nor TPUs, translated.

Those with datasets are in `test_seed_datasets.py`.

GPU names become CPU names; `tf.constant` becomes `jnp.asarray`. Where the page shows a
`tf.function`, the function runs eagerly here.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import components_equal, equal

import replicax as rx

pytestmark = pytest.mark.usefixtures("execution")


@pytest.fixture
def strategy(mirrored_strategy):
    return mirrored_strategy


# Strategy (pages 002 and 003).


def test_scope(strategy):
    with strategy.scope():
        mirrored_variable = rx.Variable(1.0)
    lines = repr(mirrored_variable).splitlines()
    assert lines[0] == "MirroredVariable:{"
    assert lines[1].startswith("  0: <rx.Variable 'Variable' shape=() dtype=float32, value=1.0>")
    if len(strategy.topology.local_replicas) == 2:
        assert lines[2].startswith("  1: <rx.Variable 'Variable/replica_1' shape=()")
    assert lines[-1] == "}"
    regular_variable = rx.Variable(1.0)
    assert repr(regular_variable) == ("<rx.Variable 'Variable' shape=() dtype=float32, value=1.0>")


def test_run_with_a_constant_input(strategy):
    tensor_input = jnp.asarray(3.0)

    def replica_fn(input):
        return input * 2.0

    result = strategy.run(replica_fn, args=(tensor_input,))
    components_equal(strategy, result, [6.0] * strategy.num_replicas_in_sync)


def test_run_with_distributed_values(strategy):
    def run():
        def value_fn(value_context):
            return value_context.num_replicas_in_sync

        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

        def replica_fn2(input):
            return input * 2

        return strategy.run(replica_fn2, args=(distributed_values,))

    count = strategy.num_replicas_in_sync
    components_equal(strategy, run(), [2 * count] * count)


def test_distribute_a_constant_value(strategy):
    def value_fn(ctx):
        return jnp.asarray(1.0)

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)
    assert isinstance(local_result, tuple)
    assert [float(x) for x in local_result] == [1.0] * len(strategy.topology.local_replicas)


def test_distribute_an_array_by_replica_id(strategy):
    array_value = np.arange(3.0, -5.0, -1.0)  # the page's 3, 2, 1, and some for more replicas

    def value_fn(ctx):
        return array_value[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    local_result = strategy.experimental_local_results(distributed_values)
    assert local_result == tuple(array_value[i] for i in strategy.topology.local_replicas)


def test_distribute_the_number_of_replicas(strategy):
    def value_fn(ctx):
        return ctx.num_replicas_in_sync

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    each = (strategy.num_replicas_in_sync,) * len(strategy.topology.local_replicas)
    assert strategy.experimental_local_results(distributed_values) == each


def test_place_values_on_devices_and_distribute(strategy):
    worker_devices = strategy.extended.worker_devices
    multiple_values = {}
    for i, device in zip(strategy.topology.local_replicas, worker_devices, strict=True):
        with jax.default_device(device):
            multiple_values[i] = jnp.asarray(1.0)

    def value_fn(ctx):
        return multiple_values[ctx.replica_id_in_sync_group]

    distributed_values = strategy.experimental_distribute_values_from_function(value_fn)
    assert [next(iter(x.devices())) for x in distributed_values.values] == list(worker_devices)


def test_reduce_over_a_global_batch_of_eight():
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    shares = [np.arange(4.0), np.arange(4.0, 8.0)]
    per_replica = strategy.experimental_distribute_values_from_function(
        lambda ctx: shares[ctx.replica_id_in_sync_group]
    )
    total = strategy.reduce(rx.ReduceOp.SUM, per_replica, axis=None)
    equal(total, [0 + 4, 1 + 5, 2 + 6, 3 + 7])
    equal(strategy.reduce(rx.ReduceOp.SUM, per_replica, axis=0), 28.0)


def test_reduce_of_a_last_partial_batch():
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    shares = [np.arange(4.0), np.arange(4.0, 6.0)]
    per_replica = strategy.experimental_distribute_values_from_function(
        lambda ctx: shares[ctx.replica_id_in_sync_group]
    )
    with pytest.raises(ValueError, match="equal shapes"):
        strategy.reduce(rx.ReduceOp.SUM, per_replica, axis=None)
    equal(strategy.reduce(rx.ReduceOp.MEAN, per_replica, axis=0), 15 / 6)
    means = strategy.run(jnp.mean, args=(per_replica,))
    equal(strategy.reduce(rx.ReduceOp.MEAN, means, axis=None), (1.5 + 4.5) / 2)


def test_sum_of_replica_ids():
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])

    def step_fn():
        i = rx.get_replica_context().replica_id_in_sync_group
        return jnp.asarray(i)

    per_replica_result = strategy.run(step_fn)
    equal(strategy.reduce("SUM", per_replica_result, axis=None), 1)


def test_gather_two_replicas():
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    distributed_values = strategy.experimental_distribute_values_from_function(
        lambda _: jnp.asarray([[1], [2]])
    )
    equal(strategy.gather(distributed_values, axis=0), [[1], [2], [1], [2]])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_gather_four_replicas(axis):
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2", "CPU:3"])
    single_tensor = jnp.reshape(jnp.arange(6), (1, 2, 3))
    distributed_values = strategy.experimental_distribute_values_from_function(
        lambda _: single_tensor
    )
    gathered = strategy.gather(distributed_values, axis=axis)
    equal(gathered, np.concatenate([single_tensor] * 4, axis))


def test_gather_shapes_that_differ():
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    shapes = [(1, 2, 3), (1, 3, 3)]
    value = strategy.experimental_distribute_values_from_function(
        lambda ctx: jnp.ones(shapes[ctx.replica_id_in_sync_group])
    )
    assert strategy.gather(value, axis=1).shape == (1, 5, 3)
    for axis in (0, 2):
        with pytest.raises(ValueError, match="other dimensions"):
            strategy.gather(value, axis=axis)


# StrategyExtended (pages 000 and 001).


def test_call_for_each_replica_with_merge_call():
    distribution = rx.MirroredStrategy(["CPU:0", "CPU:1"])

    # Called once in "cross-replica" context.
    def merge_fn(distribution, three_plus_replica_id):
        # Sum the values across replicas.
        return sum(distribution.experimental_local_results(three_plus_replica_id))

    # Called once per replica, in a "replica" context.
    def fn(three):
        replica_ctx = rx.get_replica_context()
        v = three + replica_ctx.replica_id_in_sync_group
        # Computes the sum of the `v` values across all replicas.
        s = replica_ctx.merge_call(merge_fn, args=(v,))
        return s + v

    with distribution.scope():
        merged_results = distribution.run(fn, args=[3])
        assert list(distribution.experimental_local_results(merged_results)) == [10, 11]


def test_update_pseudocode():
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = rx.Variable(5.0, aggregation=rx.VariableAggregation.SUM)

    def update_fn(v):
        return v.assign(1.0)

    result = strategy.extended.update(v, update_fn)
    components_equal(strategy, result, [1.0, 1.0])


def test_colocate_vars_with(strategy):
    with strategy.scope():
        var1 = rx.Variable(1.0)
        with strategy.extended.colocate_vars_with(var1):
            # var2 and var3 will be created on the same device(s) as var1
            var2 = rx.Variable(2.0)
            var3 = rx.Variable(3.0)

        def fn(v1, v2, v3):
            # operates on v1 from var1, v2 from var2, and v3 from var3
            v1.assign(v2 + v3)

        # `fn` runs on every device `var1` is on, `var2` and `var3` will be there too.
        strategy.extended.update(var1, fn, args=(var2, var3))
    components_equal(strategy, var1, [5.0] * strategy.num_replicas_in_sync)


def test_variable_created_in_scope(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(v) is True
    v = rx.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(v) is False


def test_how_to_update_a_variable(strategy):
    """Steps 1 to 4 of page 000: compute updates, merge_call, batch_reduce_to, update."""
    with strategy.scope():
        variables = [rx.Variable(10.0), rx.Variable([1.0, 1.0])]

    def merge_fn(strategy, updates):
        reduced = strategy.extended.batch_reduce_to(
            rx.ReduceOp.SUM, list(zip(updates, variables, strict=True))
        )
        for variable, update in zip(variables, reduced, strict=True):
            strategy.extended.update(variable, lambda v, u: v.assign_sub(u), args=(update,))

    def replica_fn():
        context = rx.get_replica_context()
        weight = context.replica_id_in_sync_group + 1.0
        updates = [jnp.asarray(weight), jnp.full(2, weight)]
        context.merge_call(merge_fn, args=(updates,))

    strategy.run(replica_fn)
    count = strategy.num_replicas_in_sync
    total = count * (count + 1) / 2
    equal(variables[0], 10.0 - total)
    equal(variables[1], np.full(2, 1.0 - total))


def test_sync_on_read(strategy):
    """Page 001: replica context may read the local copy, as in v = 0.9 * v + 0.1 * update."""
    with strategy.scope():
        v = rx.Variable(
            1.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.MEAN,
        )

    def replica_fn():
        v.assign(0.9 * v + 0.1 * (rx.get_replica_context().replica_id_in_sync_group + 1.0))

    strategy.run(replica_fn)
    copies = [0.9 + 0.1 * (i + 1) for i in range(strategy.num_replicas_in_sync)]
    components_equal(strategy, v, copies)
    equal(strategy.extended.read_var(v), np.mean(copies))


# OneDeviceStrategy (page 004).


def test_one_device_strategy():
    strategy = rx.OneDeviceStrategy(device="/cpu:0")
    with strategy.scope():
        v = rx.Variable(1.0)
        assert v.device.id == 0

    def step_fn(x):
        return x * 2

    result = 0
    for i in range(10):
        result += strategy.run(step_fn, args=(i,))
    assert result == 90
