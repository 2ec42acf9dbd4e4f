"""reduce, gather and the collectives of replicas, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some
from support import components_equal, equal, per_replica, shares

import replicax as rx

pytestmark = pytest.mark.usefixtures("execution")

RANDOM = np.random.default_rng(0)


def test_reduce_combines_replicas(strategy):
    count = strategy.num_replicas_in_sync
    parts = RANDOM.normal(size=(count, 2, 3)).astype(np.float32)
    value = per_replica(strategy, parts)
    equal(strategy.reduce("SUM", value, axis=None), parts.sum(0), 1e-5)
    equal(strategy.reduce(rx.ReduceOp.MEAN, value, axis=None), parts.mean(0), 1e-5)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("axis", [0, -2, (0,), (0, 1)])
def test_reduce_over_the_batch_equals_one_device_on_the_whole_batch(strategy, rows, axis):
    batch = RANDOM.normal(size=(rows, 3)).astype(np.float32)
    value = shares(strategy, batch)  # uneven, and with empty shares when rows are few
    equal(strategy.reduce("SUM", value, axis=axis), batch.sum(axis), 1e-5)
    equal(strategy.reduce("MEAN", value, axis=axis), batch.mean(axis), 1e-5)


@given(sizes=some.lists(some.integers(0, 5), min_size=3, max_size=3), data=some.data())
def test_reduce_and_gather_of_any_shares(sizes, data):
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    parts = [
        np.array(data.draw(some.lists(some.integers(-99, 99), min_size=n, max_size=n)), np.int32)
        for n in sizes
    ]
    value, whole = per_replica(strategy, parts), np.concatenate(parts)
    equal(strategy.reduce("SUM", value, axis=0), whole.sum())
    equal(strategy.gather(value, axis=0), whole)
    if len(whole):
        equal(strategy.reduce("MEAN", value, axis=0), whole.mean())


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "float16", "bfloat16", "bool"])
def test_reduce_keeps_the_dtype_of_sums_and_means_are_fractional(two, dtype):
    value = per_replica(two, [jnp.asarray([1, 0], dtype), jnp.asarray([1, 1], dtype)])
    for axis, total, mean in [(None, [2, 1], [1, 0.5]), (0, 3, 0.75)]:
        summed = two.reduce("SUM", value, axis=axis)
        assert summed.dtype == ("int32" if dtype == "bool" else dtype)
        equal(summed.astype("float32"), total)
        equal(two.reduce("MEAN", value, axis=axis).astype("float32"), mean, 1e-3)


def test_reduce_takes_nests(two):
    value = {"a": per_replica(two, [1.0, 2.0]), "b": [per_replica(two, [[1.0], [5.0]])]}
    total = two.reduce("SUM", value, axis=None)
    equal(total["a"], 3.0)
    equal(total["b"][0], [6.0])


def test_reduce_gives_a_plain_array_on_the_first_device(two):
    total = two.reduce("SUM", per_replica(two, [1.0, 2.0]), axis=None)
    assert not isinstance(total, rx.DistributedValues)
    assert total.devices() == {two.extended.worker_devices[0]}


def test_reduce_of_what_is_the_same_everywhere(strategy):
    with strategy.scope():
        variable = rx.Variable([1.0, 3.0])
    workers = len({replica[0].process_index for replica in strategy.topology.devices})
    for value in (jnp.float32([1, 3]), np.float32([1, 3]), variable):
        equal(strategy.reduce("MEAN", value, axis=None), [1, 3])
        equal(strategy.reduce("MEAN", value, axis=0), 2.0)
        if workers > 1 and value is not variable:  # each worker has its own
            equal(strategy.reduce("SUM", value, axis=None), [workers, 3 * workers])
            equal(strategy.reduce("SUM", value, axis=0), 4.0 * workers)
        elif strategy.num_replicas_in_sync > 1:
            with pytest.raises(ValueError, match="same on all replicas"):
                strategy.reduce("SUM", value, axis=None)
        else:
            equal(strategy.reduce("SUM", value, axis=None), [1, 3])
            equal(strategy.reduce("SUM", value, axis=0), 4.0)


def test_reduce_of_an_on_read_variable_takes_its_copies(two):
    with two.scope():
        variable = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    two.run(lambda: variable.assign(rx.get_replica_context().replica_id_in_sync_group + 1.0))
    equal(two.reduce("SUM", variable, axis=None), 3.0)
    equal(two.reduce("MEAN", variable, axis=None), 1.5)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_gather_equals_concatenation(strategy, axis):
    count = strategy.num_replicas_in_sync
    parts = []
    for size in range(count):  # one of them empty
        shape = [2, 2, 2]
        shape[axis] = size
        parts.append(RANDOM.normal(size=shape).astype(np.float32))
    out = strategy.gather(per_replica(strategy, parts), axis=axis)
    equal(out, np.concatenate(parts, axis))


def test_gather_of_a_mirrored_variable_repeats_it(two):
    with two.scope():
        variable = rx.Variable([1.0, 2.0])
    equal(two.gather(variable, axis=0), [1, 2, 1, 2])


def run_collective(strategy, call, value):
    return strategy.run(lambda x: call(rx.get_replica_context(), x), args=(value,))


def test_all_reduce_and_all_gather(strategy):
    count = strategy.num_replicas_in_sync
    parts = RANDOM.normal(size=(count, 2, 3)).astype(np.float32)
    ints = np.arange(count, dtype=np.int32)
    value = {"x": per_replica(strategy, parts), "i": [per_replica(strategy, ints)]}
    for op, expected in (("SUM", parts.sum(0)), ("mean", parts.mean(0))):
        out = run_collective(strategy, lambda c, x, op=op: c.all_reduce(op, x), value)
        for part in strategy.experimental_local_results(out["x"]):
            equal(part, expected, 1e-5)
        whole = ints.sum() if op == "SUM" else ints.mean()
        components_equal(strategy, out["i"][0], [whole] * count)
    for axis in (0, 1):
        out = run_collective(strategy, lambda c, x, axis=axis: c.all_gather(x["x"], axis), value)
        components_equal(strategy, out, [np.concatenate(parts, axis)] * count)


def test_results_are_on_the_replicas_own_devices(two):
    out = run_collective(two, lambda c, x: c.all_reduce("SUM", x) * x, per_replica(two, [1.0, 2.0]))
    assert [x.devices() for x in out.values] == [{d} for d in two.extended.worker_devices]


def test_all_gather_of_uneven_shares(two):
    value = per_replica(two, [np.float32([1, 2, 3]), np.float32([4])])
    out = run_collective(two, lambda c, x: c.all_gather(x, axis=0), value)
    components_equal(two, out, [[1, 2, 3, 4]] * 2)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_the_gradient_of_all_reduce_is_all_reduce_of_the_gradients(strategy, op):
    count = strategy.num_replicas_in_sync
    weights = RANDOM.normal(size=(count, 2)).astype(np.float32)

    def fn(weight):
        def loss(x, i):
            total = rx.get_replica_context().all_reduce(op, {"x": x, "i": i})
            return jnp.sum(total["x"] * weight) + jnp.sum(total["i"])

        return jax.grad(loss)(jnp.ones(2), jnp.int32(1))

    out = strategy.run(fn, args=(per_replica(strategy, weights),))
    expected = weights.sum(0) if op == "SUM" else weights.mean(0)
    for part in strategy.experimental_local_results(out):
        equal(part, expected, 1e-5)


def test_the_gradient_of_all_gather_is_the_own_part_of_the_summed_gradients(two):
    weights = per_replica(two, [np.float32([1, 2, 3]), np.float32([10, 20, 30])])
    inputs = per_replica(two, [np.float32([5]), np.float32([6, 7])])

    def fn(x, weight):
        gather = rx.get_replica_context().all_gather
        return jax.grad(lambda x: jnp.sum(gather(x, axis=0) * weight))(x)

    components_equal(two, two.run(fn, args=(inputs, weights)), [[11], [22, 33]])


@pytest.mark.parametrize("axis", [0, 1])
def test_the_gradient_of_all_gather_of_equal_shares(strategy, axis):
    count = strategy.num_replicas_in_sync
    shape = (2 * count, 3) if axis == 0 else (2, 3 * count)
    weights = [
        np.arange(6.0 * count, dtype=np.float32).reshape(shape) * (r + 1) for r in range(count)
    ]

    def fn(x, weight):
        gather = rx.get_replica_context().all_gather
        return rx.grad(lambda: jnp.sum(gather(variable * x, axis=axis) * weight), variable)()

    with strategy.scope():
        variable = rx.Variable(np.ones((2, 3), np.float32))
    given = (per_replica(strategy, [np.ones((2, 3), np.float32)] * count),)
    result = strategy.run(fn, args=(*given, per_replica(strategy, weights)))
    components_equal(strategy, result, np.split(sum(weights), count, axis=axis))


def test_options_are_accepted_under_both_names(two):
    hints = rx.experimental.CollectiveHints(bytes_per_pack=1024, timeout_seconds=3.0)
    options = rx.experimental.CommunicationOptions(
        implementation=rx.experimental.CommunicationImplementation.RING
    )
    value, extended = per_replica(two, [1.0, 2.0]), two.extended
    for out in (
        extended.reduce_to("SUM", value, value, hints),
        extended.reduce_to("SUM", value, value, experimental_hints=options),
        extended.reduce_to("SUM", value, value, options=options),
        *extended.batch_reduce_to("SUM", [(value, value)], hints),
        *extended.batch_reduce_to("SUM", [(value, value)], options=hints),
        run_collective(two, lambda c, x: c.all_reduce("SUM", x, options), value),
        run_collective(two, lambda c, x: c.all_reduce("SUM", x, experimental_hints=hints), value),
        run_collective(two, lambda c, x: c.all_gather(x[None], 0, hints).sum(), value),
    ):
        components_equal(two, out, [3.0, 3.0])
    assert rx.experimental.CollectiveCommunication is rx.experimental.CommunicationImplementation


@pytest.mark.parametrize(
    "make",
    [
        lambda: rx.experimental.CollectiveHints(bytes_per_pack=-1),
        lambda: rx.experimental.CollectiveHints(timeout_seconds=0),
        lambda: rx.experimental.CommunicationOptions(implementation="RING"),
    ],
)
def test_impossible_options_are_refused(make):
    with pytest.raises(ValueError, match="must be"):
        make()


def test_means_of_many_halves_do_not_overflow(two):
    value = per_replica(two, [jnp.ones(50_000, jnp.float16)] * 2)
    mean = two.reduce("MEAN", value, axis=0)
    assert mean.dtype == jnp.float16
    equal(mean, 1.0)


def test_results_can_be_waited_for(two):
    value = per_replica(two, [1.0, 2.0])
    assert jax.block_until_ready(value) is value
