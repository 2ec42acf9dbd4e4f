"""Meaningless input is refused before anything has changed."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import components_equal, equal, per_replica

import replicax as rx

pytestmark = pytest.mark.usefixtures("execution")


@pytest.fixture
def three():
    return rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])


def test_unknown_and_repeated_devices():
    for make in (
        lambda: rx.MirroredStrategy(["CPU:0", "CPU:99"]),
        lambda: rx.OneDeviceStrategy("GPU:0"),
        lambda: rx.experimental.CentralStorageStrategy(["CPU:0"], "CPU:99"),
    ):
        with pytest.raises(ValueError, match=r"The devices are: CPU:0, CPU:1"):
            make()
    with pytest.raises(ValueError, match="more than once"):
        rx.MirroredStrategy(["CPU:0", "CPU:1", "/cpu:0"])
    with pytest.raises(ValueError, match="at least one device"):
        rx.MirroredStrategy([])


def test_run(strategy):
    for fn in (None, 3, "step"):
        with pytest.raises(TypeError, match="needs a function"):
            strategy.run(fn)
        with pytest.raises(TypeError, match="needs a function"):
            strategy.extended.call_for_each_replica(fn)
    with pytest.raises(TypeError, match=r"write `args=\(x,\)`"):
        strategy.run(lambda x: x, args=jnp.ones(2))
    with pytest.raises(TypeError, match="must be a RunOptions"):
        strategy.run(int, options={"bucketize": True})
    strategy.run(lambda: None, options=rx.RunOptions())


def test_values_of_another_strategy(two, three):
    elsewhere = rx.MirroredStrategy(["CPU:6", "CPU:7"])
    calls = []
    for foreign in (per_replica(three, [1.0] * 3), per_replica(elsewhere, [1.0] * 2)):
        for use in (
            lambda x: two.run(calls.append, args=(x,)),
            lambda x: two.run(calls.append, kwargs={"object": [x]}),
            lambda x: two.reduce("SUM", x, axis=None),
            lambda x: two.gather(x, axis=0),
            lambda x: two.extended.reduce_to("SUM", x, x),
            lambda x: two.extended.batch_reduce_to("SUM", [(x, "CPU:0")]),
        ):
            with pytest.raises(rx.errors.ForeignValue, match="belongs to another strategy"):
                use(foreign)
    assert not calls
    with pytest.raises(ValueError, match="another strategy"):
        two.run(calls.append, args=(rx.PerReplica((1, 2, 3)),))
    # The same devices are the same place, whichever strategy made the value.
    twin = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    equal(twin.reduce("SUM", per_replica(two, [1.0, 2.0]), axis=None), 3.0)


@pytest.mark.parametrize("op", ["SUM", "MEAN", rx.ReduceOp.MAX])
def test_values_that_are_no_numbers(two, op):
    words = per_replica(two, ["a", "b"])
    for use in (
        lambda: two.reduce(op, words, axis=None),
        lambda: two.reduce(op, words, axis=0),
        lambda: two.reduce(op, "word", axis=None),
        lambda: two.extended.reduce_to(op, words, words),
        lambda: two.gather(words, axis=0),
        lambda: two.run(lambda: rx.get_replica_context().all_reduce(op, "word")),
    ):
        with pytest.raises(rx.errors.InvalidType, match="combines numbers"):
            use()


@pytest.mark.parametrize("op", ["MEDIAN", "", 3, None, rx.VariableAggregation.SUM])
def test_unknown_reduce_ops(two, op):
    value = per_replica(two, [1.0, 2.0])
    for use in (
        lambda: two.reduce(op, value, axis=None),
        lambda: two.extended.reduce_to(op, value, value),
        lambda: two.extended.batch_reduce_to(op, [(value, value)]),
        lambda: two.run(lambda: rx.get_replica_context().all_reduce(op, 1.0)),
    ):
        with pytest.raises(
            ValueError, match=r"Unknown ReduceOp.*SUM, MEAN, .* or ReduceOp\.MAX, ReduceOp\.MIN"
        ):
            use()


def test_reduce_of_different_shapes(two):
    value = per_replica(two, [np.int32([0, 1, 2, 3]), np.int32([4, 5])])
    with pytest.raises(ValueError, match=r"replica 0: \(4,\), replica 1: \(2,\).*axis=0"):
        two.reduce("SUM", value, axis=None)
    with pytest.raises(ValueError, match=r"replica 0: \(4,\), replica 1: \(2,\)"):
        two.run(lambda x: rx.get_replica_context().all_reduce("SUM", x), args=(value,))
    for axis in (1, -2, (0, 1)):
        with pytest.raises(ValueError, match="out of range"):
            two.reduce("SUM", value, axis=axis)
    uneven = per_replica(two, [np.ones((2, 3)), np.ones((2, 4))])
    with pytest.raises(ValueError, match="equal shapes"):
        two.reduce("SUM", uneven, axis=0)


def test_reduce_of_different_dtypes(two):
    value = per_replica(two, [np.int32(1), np.float32(1)])
    with pytest.raises(TypeError, match="replica 0: int32, replica 1: float32"):
        two.reduce("SUM", value, axis=None)


def test_gather(two):
    scalars = per_replica(two, [1.0, 2.0])
    ranks = per_replica(two, [np.ones(2), np.ones((2, 2))])
    shapes = per_replica(two, [np.ones((1, 2, 3)), np.ones((1, 3, 3))])
    for value, axis, message in [
        (scalars, 0, r"at least one dimension; got (replica 0: )?\(\)"),
        (ranks, 0, r"equal ranks.*replica 0: \(2,\), replica 1: \(2, 2\)"),
        (shapes, 0, r"equal in all other dimensions.*\(1, 2, 3\).*\(1, 3, 3\)"),
        (shapes, 2, "equal in all other dimensions"),
        (shapes, 3, "from 0 to 2"),
        (shapes, -1, "from 0 to 2"),
        (shapes, "batch", "from 0 to 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            two.gather(value, axis=axis)
        with pytest.raises(ValueError, match=message):
            two.run(
                lambda x, axis=axis: rx.get_replica_context().all_gather(x, axis), args=(value,)
            )
    equal(two.gather(shapes, axis=1), np.ones((1, 5, 3)))
    with pytest.raises(TypeError, match="needs a distributed value"):
        two.gather(jnp.ones(2), axis=0)


def test_update(two, three):
    with two.scope():
        variable = rx.Variable(1.0)
    with three.scope():
        foreign = rx.Variable(1.0)
    outside = rx.Variable(1.0)
    calls = []
    for stranger in (foreign, outside):
        with pytest.raises(rx.errors.ForeignValue, match="created by another strategy"):
            two.extended.update(stranger, calls.append)
        with pytest.raises(ValueError, match="created by another strategy"):
            two.extended.update(variable, calls.append, args=(stranger,))
    with pytest.raises(TypeError, match="changes a variable"):
        two.extended.update(1.0, calls.append)
    with pytest.raises(TypeError, match="needs a function"):
        two.extended.update(variable, "fn")
    with pytest.raises(RuntimeError, match="needs cross-replica context"):
        two.run(lambda: two.extended.update(variable, calls.append))
    with pytest.raises(RuntimeError, match="update context"):
        two.extended.update(variable, lambda v: two.extended.update(v, calls.append))
    assert not calls
    components_equal(two, variable, [1.0, 1.0])


def test_colocate_vars_with(two, three):
    with three.scope():
        foreign = rx.Variable(1.0)
    with two.scope():
        variable = rx.Variable(1.0)
        with pytest.raises(ValueError, match="another strategy"):
            two.extended.colocate_vars_with(foreign).__enter__()
        with pytest.raises(TypeError, match="Destinations are"):
            two.extended.colocate_vars_with(3).__enter__()
    with pytest.raises(RuntimeError, match="needs the scope"):
        two.extended.colocate_vars_with(variable).__enter__()


def test_destinations(two):
    value = per_replica(two, [1.0, 2.0])
    for destinations in (None, 3, [1, 2], {"CPU:0"}):
        with pytest.raises(TypeError, match="Destinations are"):
            two.extended.reduce_to("SUM", value, destinations)
    with pytest.raises(ValueError, match="no device CPU:99"):
        two.extended.broadcast_to(1.0, "CPU:99")
    with pytest.raises(TypeError, match="copies one array"):
        two.extended.broadcast_to(value, "CPU:0")
    with pytest.raises(ValueError, match="same on all replicas"):
        two.extended.reduce_to("SUM", jnp.ones(2), "CPU:0")


def test_merge_call(strategy):
    with pytest.raises(TypeError, match="needs a function"):
        strategy.run(lambda: rx.get_replica_context().merge_call(3))


def test_both_names_of_the_options_at_once(two):
    value, hints = per_replica(two, [1.0, 2.0]), rx.experimental.CollectiveHints()
    with pytest.raises(ValueError, match="not both"):
        two.extended.reduce_to("SUM", value, value, hints, options=hints)
    with pytest.raises(ValueError, match="must be CommunicationOptions"):
        two.extended.reduce_to("SUM", value, value, 3)


def test_distribute_values(two):
    with pytest.raises(TypeError, match="must be a function"):
        two.experimental_distribute_values_from_function(3)
    with pytest.raises(ValueError, match=r"replica 0: .*replica 1: "):
        per_replica(two, [(1, 2), 3])


def test_arrays_of_another_replicas_device_are_moved_when_passed_as_arguments(two):
    total = two.reduce("SUM", per_replica(two, [1.0, 2.0]), axis=None)  # on the first device
    out = two.run(lambda x, y: x + y, args=(per_replica(two, [1.0, 2.0]), total))
    components_equal(two, out, [4.0, 5.0])
