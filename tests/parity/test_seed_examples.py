"""The examples of the reference pages that need neither datasets, workers nor TPUs, translated.

Those with datasets are in `test_seed_datasets.py`, those of the pages about v1 in
`test_seed_v1.py`.

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
