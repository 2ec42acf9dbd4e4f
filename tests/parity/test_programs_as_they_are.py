"""Idioms of programs that were written for the reference, as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import components_equal, equal, per_replica

import replicax as rx


@pytest.fixture
def numbers(strategy):
    """1, 2, ... on the replicas."""
    count = strategy.num_replicas_in_sync
    return per_replica(strategy, [np.float32(replica + 1) for replica in range(count)])


# `all_reduce`, `merge_call`, `update`: every optimizer that is written by hand.


def test_all_reduce_merge_call_update(strategy, numbers, execution):
    with strategy.scope():
        weight = rx.Variable(np.float32(10.0), name="weight")

    def apply(strategy, gradient):
        strategy.extended.update(weight, lambda copy, g: copy.assign_sub(g), args=(gradient,))

    def replica_step(number):
        context = rx.get_replica_context()
        context.merge_call(apply, args=(context.all_reduce("SUM", number),))

    strategy.run(replica_step, args=(numbers,))
    count = strategy.num_replicas_in_sync
    for copy in weight.values:
        equal(copy.numpy(), 10.0 - count * (count + 1) / 2)


def test_devices_that_are_neither_one_nor_a_replica_each_are_refused():
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    numbers = per_replica(strategy, [1.0, 2.0, 3.0])
    calls = []
    with pytest.raises(rx.errors.InvalidArgument, match=r"3 components, for 2 copies.*reduce_to"):
        strategy.extended.update_non_slot(["CPU:0", "CPU:1"], calls.append, args=(numbers,))
    assert not calls


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("by_name", [False, True])
def test_each_copy_gets_the_component_of_its_replica(strategy, numbers, compiled, by_name):
    with strategy.scope():
        local = rx.Variable(np.float32(0.0), synchronization="ON_READ", aggregation="SUM")
        mirrored = rx.Variable(np.float32(0.0))

    def step(x):
        arguments = {"kwargs": {"x": x}} if by_name else {"args": (x,)}
        for variable in (local, mirrored):
            strategy.extended.update(variable, lambda copy, x: copy.assign_add(x), **arguments)

    with strategy.scope():
        (rx.function(step) if compiled else step)(numbers)
    components_equal(strategy, local, [r + 1 for r in range(strategy.num_replicas_in_sync)])
    if len(mirrored.values) < len(local.values):
        equal(mirrored.numpy(), 1.0)  # the one copy is the first replica's
    else:
        components_equal(strategy, mirrored, [r + 1 for r in range(strategy.num_replicas_in_sync)])


@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in merge_call"])
@pytest.mark.parametrize("which", ["copies", "one device"])
def test_what_update_returns_for_per_replica_values(two, execution, group, inside, which):
    with two.scope():
        local = rx.Variable(np.float32(0.0), synchronization="ON_READ", aggregation="SUM")
    numbers = per_replica(two, [np.float32(1.0), np.float32(2.0)])

    def update(strategy, number):
        if which == "one device":
            return strategy.extended.update_non_slot(
                "CPU:0", lambda x: x * 10, args=(number,), group=group
            )
        return strategy.extended.update(local, lambda copy, x: x * 10, args=(number,), group=group)

    if inside:
        result = two.run(
            lambda x: rx.get_replica_context().merge_call(update, args=(x,)), args=(numbers,)
        )
    elif execution == "compiled":
        with two.scope():
            result = rx.function(lambda x: update(two, x))(numbers)
    else:
        with two.scope():
            result = update(two, numbers)
    parts = [
        [np.asarray(x).tolist() for x in two.experimental_local_results(each)]
        for each in ([result] if group else result)
    ]
    flat = [sorted(set(part)) for part in parts]
    if which == "one device":
        assert flat == [[10.0]]
    elif group:
        assert flat == [[10.0, 20.0]]
    else:
        assert flat == [[10.0], [20.0]]


@pytest.fixture
def checking():
    rx.config.check_mirrored(True)
    yield
    rx.config.check_mirrored(False)


def test_copies_that_differ_are_named_after_a_step(strategy, numbers, execution, checking):
    with strategy.scope():
        weight = rx.Variable(np.float32([1.0, 2.0]), name="weight")
        local = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        key = rx.Variable(jax.random.key(0), name="key", trainable=False)

    def change(strategy, number):
        strategy.extended.update(weight, lambda copy, x: copy.assign(copy + x), args=(number,))
        key.assign(jax.random.key(1))

    def replica_step(number):
        local.assign_add(number)  # whose copies may differ
        rx.get_replica_context().merge_call(change, args=(number,))

    strategy.run(replica_step, args=(jnp.float32(1.0),))
    equal(weight.numpy(), [2.0, 3.0])
    if len(weight.values) == 1 < strategy.topology.num_replicas:
        return  # one copy is equal to itself
    if strategy.topology.num_replicas == 1:
        strategy.run(replica_step, args=(numbers,))
        return
    sharded = rx.FullyShardedStrategy, rx.MultiWorkerFullyShardedStrategy
    if isinstance(strategy, sharded) and execution == "compiled":
        return  # there are no copies: each replica has changed its own part
    with pytest.raises(rx.errors.CopiesDiffer, match="the copies of variable 'weight'") as caught:
        strategy.run(replica_step, args=(numbers,))
    last = strategy.topology.num_replicas - 1
    assert f"{last} are not that of replica 0" in str(caught.value)
    if execution == "eager":
        equal(weight.numpy(), [2.0, 3.0])
        equal([copy.numpy() for copy in weight.values], [[2.0, 3.0]] * len(weight.values))


def test_gradients_that_differ_and_are_not_summed(two, checking, execution):
    with two.scope():
        weight, optimizer = rx.Variable(1.0, name="weight"), rx.Optimizer(optax.sgd(1.0))

    def replica_step(x):
        optimizer.apply_gradients([(x, weight)], skip_gradients_aggregation=True)

    two.run(replica_step, args=(jnp.float32(1.0),))
    with pytest.raises(rx.errors.CopiesDiffer, match=r"on replicas 1 are.*difference.* is 1"):
        two.run(replica_step, args=(per_replica(two, [np.float32(1), np.float32(2)]),))


# One replica.


@pytest.mark.parametrize("devices", [["CPU:0"], ["CPU:0", "CPU:1"]], ids=["one", "two"])
def test_merge_call_gets_plain_values_from_one_replica(devices, execution):
    strategy = rx.MirroredStrategy(devices)
    kinds = []

    def merged(strategy, value):
        kinds.append(isinstance(value, rx.PerReplica))
        return strategy.reduce("SUM", value, axis=None)

    result = strategy.run(
        lambda x: rx.get_replica_context().merge_call(merged, args=(x * 2,)),
        args=(jnp.float32(3.0),),
    )
    assert set(kinds) == {len(devices) > 1}
    components_equal(strategy, result, [6.0 * len(devices)] * len(devices))


def test_a_value_of_one_component_is_an_array():
    value = rx.PerReplica((jnp.float32(2.5),))
    assert (float(value), int(value), complex(value)) == (2.5, 2, 2.5 + 0j)
    equal(np.asarray(value), 2.5)
    equal(jnp.asarray(value) + 1, 3.5)
    for use in (float, int, np.asarray, jnp.asarray):
        with pytest.raises(rx.errors.InvalidType, match="one component per replica"):
            use(rx.PerReplica((1.0, 2.0)))


# Variables.


def test_a_variable_is_not_written_in_the_scope_of_another_strategy(two):
    other = rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    variables = []
    for synchronization in ("AUTO", "ON_READ"):
        with two.scope():
            variables.append(rx.Variable(1.0, synchronization=synchronization, aggregation="MEAN"))
    plain = rx.Variable(1.0)
    with other.scope():
        for variable in variables:
            with pytest.raises(RuntimeError, match="cannot be written here"):
                variable.assign(2.0)
            assert float(variable) == 1.0
        plain.assign(2.0)
    for variable in variables:
        variable.assign(3.0)
        assert float(variable) == 3.0


def test_an_on_read_variable_may_be_trainable(strategy, execution):
    with strategy.scope():
        variable = rx.Variable(1.0, trainable=True, synchronization="ON_READ", aggregation="MEAN")
    assert variable.trainable
    gradients = strategy.run(lambda: rx.grad(lambda: variable * 3.0, variable)())
    components_equal(strategy, gradients, [3.0] * strategy.num_replicas_in_sync)


def test_arguments_that_programs_give(strategy):
    with strategy.scope():
        variable = rx.Variable(1.0, aggregation=None)
    assert variable.aggregation is rx.VariableAggregation.NONE
    variable.assign(2.0, use_locking=True, name="write", read_value=False)
    variable.assign_add(2.0, use_locking=True, name="write", read_value=False)
    variable.assign_sub(1.0, True, "write", False)
    assert float(variable) == 3.0
    options = rx.RunOptions(experimental_xla_options=None)
    components = strategy.run(lambda: jnp.ones(()), options=options)
    components_equal(strategy, components, [1.0] * strategy.num_replicas_in_sync)


def test_a_checkpoint_is_restored_in_the_scope_of_another_strategy(two, tmp_path):
    with two.scope():
        weight = rx.Variable(jnp.ones(2))
    path = rx.Checkpoint(weight=weight).save(str(tmp_path / "ckpt"))
    weight.assign([0.0, 0.0])
    with rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]).scope():
        rx.Checkpoint(weight=weight).restore(path)
    equal(weight.numpy(), [1.0, 1.0])


# Shares without rows.


def test_an_empty_share_that_makes_a_function_fail_is_named(two):
    def replica_step(rows):
        return rows[0] if rows.shape[0] else [][0]

    shares = per_replica(two, [np.ones((2, 1), np.float32), np.ones((0, 1), np.float32)])
    with pytest.raises(IndexError) as caught:
        two.run(replica_step, args=({"rows": shares}["rows"],))
    notes = "\n".join(caught.value.__notes__)
    assert "Raised in replica 1" in notes
    assert "The share of replica 1 has 0 rows" in notes
    assert "drop_remainder=True" in notes
    with pytest.raises(KeyError):  # and not what comes of looking at ragged lists
        two.run(lambda x: {}["x"], args=(rx.PerReplica(([[1], [2, 3]], [[1], [2, 3]])),))
    with pytest.raises(IndexError) as caught:
        two.run(lambda x: [][0], args=(jnp.ones((0, 1)),))
    assert "0 rows" not in "\n".join(caught.value.__notes__)
