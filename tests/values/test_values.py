"""PerReplica, Mirrored, and how results are merged."""

import copy
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import components_equal, equal, per_replica

import replicax as rx
from replicax.collectives import regroup
from replicax.values import select


@pytest.fixture
def topology(two):
    return two.topology


class Pair(NamedTuple):
    left: object
    right: object


def test_repr():
    value = rx.PerReplica((jnp.float32(1), jnp.float32(3)))
    assert repr(value) == (
        "PerReplica:{\n  0: Array(1., dtype=float32),\n  1: Array(3., dtype=float32)\n}"
    )
    assert repr(rx.Mirrored((1, 1))) == "Mirrored:{\n  0: 1,\n  1: 1\n}"


def test_distributed_values_are_leaves():
    value = rx.PerReplica((1, 2))
    assert jax.tree.leaves({"a": [value]}) == [value]
    assert isinstance(value, rx.DistributedValues)


@pytest.mark.parametrize("kind", [rx.PerReplica, rx.Mirrored])
def test_pickling_is_refused_with_the_way_out(kind):
    with pytest.raises(TypeError, match=r"cannot be pickled.*gather"):
        pickle.dumps(kind((1, 2)))


def test_a_per_replica_value_is_no_array():
    value = rx.PerReplica((1.0, 2.0))
    for use in (jnp.sum, jnp.asarray, np.asarray, lambda x: jnp.ones(1) + x):
        with pytest.raises(TypeError, match=r"reduce"):
            use(value)


def test_a_mirrored_value_is_an_array(two):
    value = two.extended.broadcast_to(jnp.arange(3.0), two.extended.worker_devices)
    assert isinstance(value, rx.Mirrored)
    equal(value + 1, [1, 2, 3])
    equal(2 - value, [2, 1, 0])
    equal(jnp.sum(jnp.asarray(value)), 3)
    equal(np.asarray(value), [0, 1, 2])
    equal(value.numpy(), [0, 1, 2])
    equal(value[1], 1)


def test_components_and_global_array_are_two_views_of_one_value(two):
    topology = two.topology
    parts = [np.float32([[1, 2]]), np.float32([[3, 4]])]
    value = per_replica(two, parts)
    array = value.array(topology)
    assert array.shape == (2, 2)
    assert array.sharding == topology.split
    again = rx.PerReplica.from_array(array, topology)
    components_equal(two, again, parts)
    assert [x.devices() for x in again.values] == [{d} for d in topology.local_devices]


def test_scalars_are_stacked(two):
    value = per_replica(two, [1.0, 2.0])
    array = value.array(two.topology)
    assert array.shape == (2,)
    again = rx.PerReplica.from_array(array, two.topology, scalars=True)
    components_equal(two, again, [1.0, 2.0])
    assert again.scalars


def test_values_need_one_component_a_replica(topology):
    with pytest.raises(ValueError, match="got none"):
        rx.PerReplica(())
    with pytest.raises(ValueError, match=r"3 component\(s\) for 2"):
        rx.PerReplica((1, 2, 3), topology)


class Elsewhere:
    """A device of another process."""

    process_index, platform, id = 1, "cpu", 1


@pytest.fixture
def shared():
    """Two replicas, the second of which belongs to a worker that nobody has started."""
    return rx.Topology(((jax.devices()[0],), (Elsewhere(),)))


def test_shapes_never_wait_for_another_worker(shared):
    value = rx.PerReplica([jnp.ones((2, 3))], shared)
    assert value.known_shapes() is None
    for ask in (
        lambda: value.shapes,
        lambda: value.uniform,
        lambda: value.array(shared),
        lambda: value.padded(shared),
    ):
        with pytest.raises(rx.errors.InvalidArgument, match=r"this one has \(2, 3\).*gather"):
            ask()
    value.learn_shapes([(2, 3), (4, 3)])
    assert value.shapes == ((2, 3), (4, 3))
    assert not value.uniform
    assert value.replaced(0, jnp.zeros((2, 3))).shapes == value.shapes
    with pytest.raises(ValueError, match=r"replica 0: \(2, 3\), replica 1: \(4, 3\)"):
        value.array(shared)


def test_regroup_keeps_the_same_object_and_wraps_the_rest(topology):
    thing, array = object(), jnp.ones(2)
    merged = regroup([[thing, array, "a", None, 1.5], [thing, array, "b", None, 2.5]], topology)
    assert merged[0] is thing
    assert merged[1] is array
    assert merged[2].values == ("a", "b")
    assert merged[3] is None
    assert merged[4].values == (1.5, 2.5)


def test_regroup_keeps_structure(topology):
    merged = regroup([{"x": Pair([1], 2), "y": (3,)}, {"x": Pair([10], 20), "y": (30,)}], topology)
    assert isinstance(merged["x"], Pair)
    assert merged["x"].left[0].values == (1, 10)
    assert merged["x"].right.values == (2, 20)
    assert merged["y"][0].values == (3, 30)


def test_regroup_with_one_replica_wraps_nothing_unless_told_to():
    one = rx.Topology.of(["CPU:0"])
    assert regroup([(1, [2])], one) == (1, [2])
    assert regroup([(1,)], one, always_wrap=True)[0].values == (1,)


def test_regroup_refuses_different_structures(topology):
    with pytest.raises((TypeError, ValueError), match=r"replica 0: .*replica 1: "):
        regroup([(1, 2), (1, 2, 3)], topology)


def test_components_of_a_variable_become_the_variable(two):
    with two.scope():
        variable = rx.Variable(1.0)
    merged = regroup([[part] for part in variable.values], two.topology)
    assert merged[0] is variable


def test_select_takes_components_and_brings_arrays_to_the_replica(two):
    first, second = two.extended.worker_devices
    placed = jax.device_put(jnp.ones(2), first)
    free = jnp.ones(2)
    for keep_opaque in (False, True):
        chosen = select(
            [rx.PerReplica((1, 2)), placed, free, "text", 7],
            1,
            two.topology,
            keep_opaque=keep_opaque,
        )
        assert chosen[0] == 2
        assert chosen[1].devices() == {second}
        assert chosen[2] is free if keep_opaque else chosen[2].devices() == {second}
        assert chosen[3:] == ["text", 7]


def test_local_results(strategy):
    count = strategy.num_replicas_in_sync
    value = per_replica(strategy, list(range(count)))
    components_equal(strategy, value, range(count))
    array = jnp.ones(3)
    assert strategy.experimental_local_results(array)[0] is array
    assert strategy.experimental_local_results(7) == (7,)
    assert strategy.experimental_local_results(None) == (None,)
    nests = strategy.experimental_local_results({"a": value, "b": 5})
    local = strategy.topology.local_replicas
    assert [int(nest["a"]) for nest in nests] == list(local)
    assert [nest["b"] for nest in nests] == [5] * len(local)


def test_distributed_values_are_on_their_replicas_devices(strategy):
    value = strategy.experimental_distribute_values_from_function(
        lambda context: {"id": context.replica_id_in_sync_group, "of": context.num_replicas_in_sync}
    )
    devices = strategy.extended.worker_devices
    assert isinstance(value["id"], rx.PerReplica)
    assert [int(x) for x in value["id"].values] == list(strategy.topology.local_replicas)
    count = strategy.num_replicas_in_sync
    assert [int(x) for x in value["of"].values] == [count] * len(devices)
    topology = strategy.topology
    expected = [set(topology.devices[replica]) for replica in topology.local_replicas]
    assert [x.devices() for x in value["id"].values] == expected


def test_values_of_other_types_are_distributed_as_they_are(two):
    assert per_replica(two, ["a", "b"]).values == ("a", "b")


def test_a_strategy_is_not_copied_or_pickled(two):
    assert copy.deepcopy(two) is two
    with pytest.raises(TypeError, match="Make the strategy again"):
        pickle.dumps(two)
    default = rx.get_strategy()
    assert pickle.loads(pickle.dumps(default)) is default
