"""The examples of the reference pages about v1, translated: 000 and 001 (StrategyExtended), 004.

The pages about StrategyExtended hold for both faces, and so do their tests. GPU names become CPU
names, `...` in the pages is filled in, and datasets that the pages make up are Grain's.
"""

import grain
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pipelines import record_dataset
from support import components_equal, copies_equal, equal

import replicax as rx

pytestmark = [
    pytest.mark.usefixtures("execution"),
    pytest.mark.filterwarnings("ignore:.* deprecated, here as in the reference"),
]

FACES = {
    "v2": lambda: rx.MirroredStrategy(["CPU:0", "CPU:1"]),
    "v1": lambda: rx.compat.v1.MirroredStrategy(["CPU:0", "CPU:1"]),
    "v1, central": lambda: rx.compat.v1.experimental.CentralStorageStrategy(
        ["CPU:0", "CPU:1"], "CPU:5"
    ),
    "v1, one device": lambda: rx.compat.v1.OneDeviceStrategy("CPU:1"),
}
V1 = [name for name in FACES if name != "v2"]


@pytest.fixture(params=FACES)
def strategy(request):
    return FACES[request.param]()


@pytest.fixture(params=V1)
def v1_strategy(request):
    return FACES[request.param]()


@pytest.fixture(params=["v2", "v1"])
def mirrored(request):
    return FACES[request.param]()


# StrategyExtended (pages 000 and 001).


def test_call_for_each_replica_with_merge_call(mirrored):
    distribution = mirrored

    # Called once in "cross-replica" context.
    def merge_fn(distribution, three_plus_replica_id):
        # sum the values across replicas
        return sum(distribution.experimental_local_results(three_plus_replica_id))

    # Called once per replica in `distribution`, in a "replica" context.
    def fn(three):
        replica_ctx = rx.get_replica_context()
        v = three + replica_ctx.replica_id_in_sync_group
        # Computes the sum of the `v` values across all replicas.
        s = replica_ctx.merge_call(merge_fn, args=(v,))
        return s + v

    with distribution.scope():
        # in "cross-replica" context
        for run in (distribution.run, distribution.extended.call_for_each_replica):
            merged_results = run(fn, args=[3])
            # merged_results has the values from every replica execution of `fn`.
            assert list(distribution.experimental_local_results(merged_results)) == [10, 11]


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
    copies_equal(strategy, var1, 5.0)
    for variable in (var2, var3):
        assert devices_of(variable) == devices_of(var1)


def devices_of(variable):
    return [copy.device for copy in variable.values]


def test_the_slots_of_an_optimizer_are_colocated_with_their_variable(strategy):
    """This holds for the library's optimizer, and for a user's as the page describes it."""
    with strategy.scope():
        weight = rx.Variable([1.0, 2.0])
        optimizer = rx.Optimizer(optax.sgd(0.1, momentum=0.9))
        with strategy.extended.colocate_vars_with(weight):
            momentum = rx.Variable(jnp.zeros(2))
        with strategy.extended.colocate_vars_with(strategy.extended.non_slot_devices([weight])):
            steps = rx.Variable(0)

    def train():
        gradient = jnp.ones(2) / strategy.num_replicas_in_sync
        optimizer.apply_gradients([(gradient, weight)])

    strategy.run(train)
    devices = devices_of(weight)
    assert devices == list(strategy.extended.parameter_devices)
    slots = [v for v in optimizer.variables if v.shape == weight.shape]
    assert slots, "momentum has a slot for the weight"
    for variable in (*slots, momentum, steps):
        assert devices_of(variable) == devices
        assert strategy.extended.variable_created_in_scope(variable)

    def own_update(weight, momentum, gradient):
        momentum.assign(0.9 * momentum + gradient)
        weight.assign_sub(0.1 * momentum)

    gradient = strategy.extended.broadcast_to(jnp.ones(2), weight)
    strategy.extended.update(weight, own_update, args=(momentum, gradient))
    strategy.extended.update_non_slot(
        strategy.extended.non_slot_devices([weight]), lambda s: s.assign_add(1), args=(steps,)
    )
    copies_equal(strategy, weight, np.float32([0.8, 1.8]))
    copies_equal(strategy, momentum, np.ones(2))
    copies_equal(strategy, steps, 1)


def test_update(mirrored):
    with mirrored.scope():
        v = rx.Variable(5.0, aggregation=rx.VariableAggregation.SUM)

    def update_fn(v):
        return v.assign(1.0)

    result = mirrored.extended.update(v, update_fn)
    components_equal(mirrored, result, [1.0, 1.0])
    equal(v, 1.0)


def test_what_update_does(strategy):
    """The loop by which the page explains it."""
    with strategy.scope():
        var = rx.Variable(5.0)
    seen = {}

    def fn(v, amount):
        seen[v.device] = v.assign_add(amount)

    strategy.extended.update(var, fn, args=(2.0,))
    assert list(seen) == devices_of(var)
    copies_equal(strategy, var, 7.0)


def test_variable_created_in_scope(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(v) is True
    v = rx.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(v) is False


def test_a_strategy_made_of_an_extended():
    """Page 001 has the parts of a strategy in a StrategyExtended, and the class names it."""

    class Mine(rx.compat.v1.Strategy):
        def __init__(self):
            topology = rx.Topology.of(["CPU:0", "CPU:1"])
            super().__init__(rx.compat.v1.StrategyExtended(self, topology=topology))

    strategy = Mine()
    with strategy.scope():
        v = rx.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(v)
    components_equal(strategy, strategy.experimental_run(lambda: v + 1), [2.0, 2.0])


def test_how_to_update_a_variable(mirrored):
    """Steps 1 to 4 of page 000: compute updates, merge_call, batch_reduce_to, update."""
    with mirrored.scope():
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

    mirrored.run(replica_fn)
    equal(variables[0], 7.0)
    equal(variables[1], [-2.0, -2.0])


def test_sync_on_read(mirrored):
    """Page 001: replica context may read the local copy, as in v = 0.9 * v + 0.1 * update."""
    with mirrored.scope():
        v = rx.Variable(
            1.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.MEAN,
        )

    def replica_fn():
        v.assign(0.9 * v + 0.1 * (rx.get_replica_context().replica_id_in_sync_group + 1.0))

    mirrored.run(replica_fn)
    components_equal(mirrored, v, [1.0, 1.1])
    equal(mirrored.extended.read_var(v), 1.05)
    with pytest.raises(ValueError, match="mean nothing across replicas"):
        v.assign_add(1.0)


def test_merged_results(mirrored):
    """Page 001: the same object, different ones, and the members of a mirrored variable."""
    with mirrored.scope():
        v = rx.Variable(1.0)
    x = "the same object"

    def fn():
        return x, rx.get_replica_context().replica_id_in_sync_group * 1.0

    same, different = mirrored.run(fn)
    assert same is x
    components_equal(mirrored, different, [0.0, 1.0])
    copy = v.values[1]
    container = mirrored.extended.value_container(copy)
    assert container is v
    assert any(copy is value for value in mirrored.experimental_local_results(container))


# OneDeviceStrategy (page 004), whose methods all strategies of v1 have.


def test_one_device_strategy():
    strategy = rx.compat.v1.OneDeviceStrategy(device="/cpu:1")

    with strategy.scope():
        v = rx.Variable(1.0)
        assert v.device.id == 1

    def step_fn(x):
        return x * 2

    result = 0
    for i in range(10):
        result += strategy.run(step_fn, args=(i,))
    assert result == 90


def test_a_dataset_of_record_files(v1_strategy, tmp_path):
    strategy = v1_strategy
    dataset = record_dataset(tmp_path)
    # Distribute that dataset
    dist_dataset = strategy.experimental_distribute_dataset(dataset)
    # Iterate over the distributed dataset
    totals = []
    for x in dist_dataset:
        # process dataset elements
        totals.append(strategy.reduce("SUM", strategy.run(jnp.sum, args=(x,))))
    equal(totals, np.arange(16.0).reshape(4, 4).sum(1))


def test_a_dataset_of_record_files_and_an_input_signature(v1_strategy, tmp_path):
    strategy = v1_strategy
    dist_dataset = strategy.experimental_distribute_dataset(record_dataset(tmp_path))

    @rx.function(input_signature=[dist_dataset.element_spec])
    def train_step(inputs):
        # train model with inputs
        return jnp.sum(inputs)

    totals = []
    for x in dist_dataset:
        # process dataset elements
        totals.append(strategy.reduce("SUM", strategy.run(train_step, args=(x,))))
    equal(totals, np.arange(16.0).reshape(4, 4).sum(1))


GLOBAL_BATCH_SIZE = 8


def ones(input_context):
    """The page's function of an input context, with a Grain dataset."""
    batch_size = input_context.get_per_replica_batch_size(GLOBAL_BATCH_SIZE)
    d = grain.MapDataset.source([np.float32([1.0])]).repeat().batch(batch_size)
    return d[input_context.input_pipeline_id :: input_context.num_input_pipelines]


def test_datasets_from_a_function(v1_strategy):
    strategy = v1_strategy
    inputs = strategy.experimental_distribute_datasets_from_function(ones)
    for _, batch in zip(range(3), inputs, strict=False):
        replica_results = strategy.run(lambda x: x * 2, args=(batch,))
        equal(strategy.reduce("SUM", replica_results, axis=0), [2 * GLOBAL_BATCH_SIZE])


def test_datasets_from_a_function_and_an_input_signature(v1_strategy):
    strategy = v1_strategy
    inputs = strategy.experimental_distribute_datasets_from_function(ones)
    # If you want to specify `input_signature` you must first create the iterator.
    iterator = iter(inputs)

    @rx.function(input_signature=[iterator.element_spec])
    def replica_fn_with_signature(inputs):
        # train the model with inputs
        return jnp.sum(inputs)

    steps = 3
    for _ in range(steps):
        result = strategy.run(replica_fn_with_signature, args=(next(iterator),))
        equal(strategy.reduce("SUM", result), GLOBAL_BATCH_SIZE)
    iterator.close()


def test_a_numpy_dataset(v1_strategy):
    strategy = v1_strategy
    numpy_input = np.ones([10], dtype=np.float32)
    dataset = strategy.experimental_make_numpy_dataset(numpy_input)
    dist_dataset = strategy.experimental_distribute_dataset(dataset.batch(10))
    results = [strategy.run(jnp.sum, args=(x,)) for x in dist_dataset]
    equal([strategy.reduce("SUM", x) for x in results], [10.0])


def test_an_iterator_of_an_input_function(v1_strategy):
    strategy = v1_strategy
    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(ones)
        # The page's example leaves out what its text asks for, and so would read nothing there.
        with pytest.raises(RuntimeError, match=r"iterator\.initialize\(\)"):
            strategy.experimental_run(lambda x: x, iterator)
        iterator.initialize()
        replica_results = strategy.experimental_run(lambda x: jnp.sum(x), iterator)
    equal(strategy.reduce(rx.ReduceOp.SUM, replica_results), GLOBAL_BATCH_SIZE)
    iterator.close()


def test_reduce_over_the_global_batch(mirrored):
    """Values 0 to 3 on replica 0 and 4 to 7 on replica 1; then a last batch of six."""
    options = rx.InputOptions(partial_batches="in_order")  # the page's division: four and two
    with mirrored.scope():
        whole, partial = mirrored.experimental_distribute_dataset(
            [np.float32(range(8)), np.float32(range(6))], options
        )
    equal(mirrored.reduce("SUM", whole, axis=None), [4, 6, 8, 10])
    equal(mirrored.reduce("SUM", whole, axis=0), 28)
    equal(mirrored.reduce("MEAN", partial, axis=0), 2.5)
    with pytest.raises(ValueError, match="shape"):
        mirrored.reduce("SUM", partial, axis=None)


def test_run_with_a_constant_input(v1_strategy):
    tensor_input = jnp.asarray(3.0)

    @rx.function
    def replica_fn(input):
        return input * 2.0

    result = v1_strategy.run(replica_fn, args=(tensor_input,))
    components_equal(v1_strategy, result, [6.0] * v1_strategy.num_replicas_in_sync)


def test_run_with_distributed_values(v1_strategy):
    strategy = v1_strategy

    @rx.function
    def run():
        def value_fn(value_context):
            return value_context.num_replicas_in_sync

        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

        def replica_fn2(input):
            return input * 2

        return strategy.run(replica_fn2, args=(distributed_values,))

    count = strategy.num_replicas_in_sync
    components_equal(strategy, run(), [2 * count] * count)
