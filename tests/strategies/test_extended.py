"""StrategyExtended."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import components_equal, equal, per_replica

import replicax as rx

pytestmark = pytest.mark.usefixtures("execution")


@pytest.mark.one_process  # which checkpoints and summarises, and has no cluster to ask about
def test_facts(strategy):
    extended = strategy.extended
    assert extended.experimental_between_graph is False
    assert extended.experimental_require_static_shapes is False
    assert extended.experimental_should_init is True
    assert extended.should_checkpoint is True
    assert extended.should_save_summary is True
    assert strategy.cluster_resolver is None
    assert len(extended.worker_devices) == strategy.num_replicas_in_sync


def test_devices_of_this_process(strategy):
    extended, topology = strategy.extended, strategy.topology
    assert extended.worker_devices == tuple(topology.devices[i][0] for i in topology.local_replicas)
    assert isinstance(extended.parameter_devices, tuple)
    assert {*extended.worker_devices, *extended.parameter_devices} <= set(jax.local_devices())


def test_devices():
    mirrored = rx.MirroredStrategy(["CPU:1", "CPU:2"])
    assert [d.id for d in mirrored.extended.worker_devices] == [1, 2]
    assert [d.id for d in mirrored.extended.parameter_devices] == [1, 2]
    central = rx.experimental.CentralStorageStrategy(["CPU:1", "CPU:2"], "CPU:5")
    assert [d.id for d in central.extended.worker_devices] == [1, 2]
    assert [d.id for d in central.extended.parameter_devices] == [5]


def test_default_devices():
    everything = list(jax.devices())
    assert list(rx.MirroredStrategy().extended.worker_devices) == everything
    central = rx.experimental.CentralStorageStrategy()
    assert list(central.extended.worker_devices) == everything
    assert [d.id for d in central.extended.parameter_devices] == [0]
    alone = rx.experimental.CentralStorageStrategy(["CPU:3"])
    assert [d.id for d in alone.extended.parameter_devices] == [3]


def test_call_for_each_replica_is_run(strategy):
    out = strategy.extended.call_for_each_replica(lambda x, y: x + y, [1.0], {"y": 2.0})
    components_equal(strategy, out, [3.0] * strategy.num_replicas_in_sync)


def test_reduce_to_and_its_destinations(two):
    first, second = two.extended.worker_devices
    with two.scope():
        variable = rx.Variable(0.0)
    value = per_replica(two, [1.0, 2.0])
    for destinations in (variable, value, [first, second], ("CPU:0", "CPU:1")):
        out = two.extended.reduce_to("SUM", value, destinations)
        assert isinstance(out, rx.Mirrored)
        components_equal(two, out, [3.0, 3.0])
        assert [x.devices() for x in out.values] == [{first}, {second}]
    for device in ("CPU:5", jax.devices()[5]):
        out = two.extended.reduce_to("MEAN", value, device)
        assert out.devices() == {jax.devices()[5]}
        equal(out, 1.5)
    out = two.extended.reduce_to("SUM", value, jax.device_put(1.0, second))
    assert out.devices() == {second}
    elsewhere = two.extended.reduce_to("SUM", value, ["CPU:5", "CPU:6", "CPU:7"])
    assert [next(iter(x.devices())).id for x in elsewhere.values] == [5, 6, 7]
    assert two.extended.reduce_to("MEAN", out, variable).values[1].devices() == {second}


def test_batch_reduce_to_equals_many_reduce_to(strategy):
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        variables = [rx.Variable(np.zeros(shape, np.float32)) for shape in ((), (3,), (2, 2))]
    parts = [
        np.random.default_rng(i).normal(size=(count, *v.shape)).astype(np.float32)
        for i, v in enumerate(variables)
    ]
    pairs = [(per_replica(strategy, p), v) for p, v in zip(parts, variables, strict=True)]
    together = strategy.extended.batch_reduce_to("SUM", pairs)
    for out, (value, destination), part in zip(together, pairs, parts, strict=True):
        equal(out, part.sum(0), 1e-5)
        equal(strategy.extended.reduce_to("SUM", value, destination), part.sum(0), 1e-5)


def test_broadcast_to(strategy):
    out = strategy.extended.broadcast_to(jnp.float32([1, 2]), strategy.extended.worker_devices)
    components_equal(strategy, out, [[1, 2]] * strategy.num_replicas_in_sync)
    device = jax.local_devices()[6 % jax.local_device_count()]
    assert strategy.extended.broadcast_to(1.0, device).devices() == {device}


def test_colocated_variables_and_update(strategy):
    with strategy.scope():
        first = rx.Variable(1.0)
        with strategy.extended.colocate_vars_with(first):
            second, third = rx.Variable(2.0), rx.Variable(3.0)

    def fn(one, two, three):
        assert one.device == two.device == three.device
        two.assign(20.0)
        one.assign(two + three)

    strategy.extended.update(first, fn, args=(second, third))
    equal(first, 23.0)
    equal(second, 20.0)
    assert [c.device for c in second.values] == [c.device for c in first.values]


def test_non_slot_variables(strategy):
    with strategy.scope():
        weight = rx.Variable(1.0)
        devices = strategy.extended.non_slot_devices([weight])
        with strategy.extended.colocate_vars_with(devices):
            step = rx.Variable(0)
    assert devices == strategy.extended.parameter_devices
    strategy.extended.update_non_slot(devices, lambda step: step.assign_add(1), args=(step,))
    equal(step, 1)
    out = strategy.extended.update_non_slot(
        devices, lambda x: jnp.asarray(x), args=(2.0,), group=False
    )
    equal(np.array([float(x) for x in out]), [2.0] * len(devices))


def test_read_var(two):
    with two.scope():
        variable = rx.Variable(4.0)
    equal(two.extended.read_var(variable), 4.0)


@pytest.mark.parametrize(
    "given",
    [None, 4.0, "weight", np.ones(2), object()],
    ids=["None", "float", "str", "array", "object"],
)
def test_what_is_no_variable_is_refused(two, given):
    for method in (two.extended.read_var, two.extended.variable_created_in_scope):
        with pytest.raises(rx.errors.InvalidType, match=f"`{method.__name__}` takes a variable; "):
            method(given)


def test_a_strategy_of_ones_own_is_made_of_parts():
    class LastTwo(rx.Strategy):
        """Mirrored over the last two devices of the machine."""

        def __init__(self):
            topology = rx.Topology.of(jax.devices()[-2:])
            super().__init__(rx.StrategyExtended(self, topology=topology))

    strategy = LastTwo()
    assert repr(strategy) == "LastTwo(2)"
    with strategy.scope():
        variable = rx.Variable(1.0, aggregation="SUM")
    assert [copy.device.id for copy in variable.values] == [6, 7]
    strategy.run(lambda: variable.assign_add(1.0))
    equal(variable, 3.0)


def test_a_placement_of_ones_own():
    class InTurn(rx.parts.VariablePlacement):
        """Variables on one device after another, colocated ones together."""

        def __init__(self):
            self.made = 0

        def create(self, request, strategy, colocate_with):
            device = colocate_with.device if colocate_with is not None else None
            if device is None:
                devices = self.devices(strategy.topology)
                device = devices[self.made % len(devices)]
                self.made += 1
            return rx.parts.AggregatingVariable.create(request, strategy, device)

        def devices(self, topology):
            return topology.local_devices

    class Scattered(rx.Strategy):
        def __init__(self):
            topology = rx.Topology.of(["CPU:0", "CPU:1", "CPU:2"])
            super().__init__(rx.StrategyExtended(self, topology=topology, placement=InTurn()))

    strategy = Scattered()
    with strategy.scope():
        variables = [rx.Variable(float(i), aggregation="MEAN") for i in range(4)]
        with strategy.extended.colocate_vars_with(variables[1]):
            slot = rx.Variable(0.0)
    assert [v.device.id for v in variables] == [0, 1, 2, 0]
    assert slot.device.id == 1
    strategy.run(lambda: variables[3].assign(sum(v.value for v in variables)))
    equal(variables[3], 6.0)
