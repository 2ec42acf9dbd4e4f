"""A storage of one's own: state divided over the replicas, which nothing else knows of."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import cpus
from jax.core import Tracer
from jax.sharding import PartitionSpec
from support import equal

import replicax as rx
from replicax import _context
from replicax.topology import REPLICA_AXIS
from replicax.values import Mirrored, place
from replicax.variables import StateLayout, Storage, Variable, storage_of
from replicax.variables._synchronization import OnWrite


@dataclass(frozen=True)
class Parts:
    """A state: the array of all parts, or a replica's own part inside of a program."""

    array: Any
    inside: bool


class Sharded(Storage):
    """The columns of an array, as many on every replica."""

    layout = StateLayout.SHARDED

    def __init__(self, name, array, topology):
        super().__init__(name, array.shape, None)
        self._topology = topology
        self.stored = Parts(self._divided(array), inside=False)

    def spec(self, topology):
        return PartitionSpec(None, REPLICA_AXIS)

    def array_shape(self, inside, topology):
        rows, columns = self.shape
        return (rows, columns // self._topology.num_replicas) if inside else self.shape

    def _divided(self, array):
        return jax.device_put(array, self.sharding(self._topology))

    def wrap(self, array, topology, inside):
        return Parts(array, inside)

    def unwrap(self, state, topology):
        return state.array

    def rewrap(self, array, topology):
        return Parts(array, inside=False)

    num_copies = None

    def device(self, index):
        return self._topology.local_devices[index]

    def read(self, state, index, sharding=None):
        whole = self.whole(state)
        return whole if sharding is None else place(whole, sharding)

    def with_copy(self, state, index, write, value):
        return self.written(state, write, value)

    def written(self, state, write, value):
        value = value.primary if isinstance(value, Mirrored) else value
        if _context.current().program is None:
            value = self._divided(value)
        return self.of_whole(write.applied(self.whole(state), value))

    def whole(self, state):
        if state.inside:
            return jax.lax.all_gather(state.array, REPLICA_AXIS, axis=1, tiled=True)
        return state.array

    def of_whole(self, array):
        program = _context.current().program
        if program is not None and program.inside:
            columns = self.array_shape(True, self._topology)[1]
            first = jax.lax.axis_index(REPLICA_AXIS) * columns
            return Parts(jax.lax.dynamic_slice_in_dim(array, first, columns, 1), inside=True)
        if isinstance(array, Tracer):
            return Parts(array, inside=False)
        return Parts(self._divided(array), inside=False)


class ShardedVariable(Variable):
    @classmethod
    def create(cls, request, strategy):
        array = request.initial_array()
        storage = Sharded(request.name, array, strategy.topology)
        return cls._made(request, strategy, storage, OnWrite(), array.dtype)


class InParts(rx.parts.VariablePlacement):
    """A placement that divides state with columns; the rest, such as a count, is mirrored."""

    def create(self, request, strategy, colocate_with):
        if np.ndim(request.initial_array()) == 0:
            return rx.parts.MirroredVariable.create(request, strategy, colocate_with)
        return ShardedVariable.create(request, strategy)

    def devices(self, topology):
        return topology.local_devices


class Divided(rx.Strategy):
    def __init__(self, devices):
        topology = rx.Topology.of(devices)
        super().__init__(rx.StrategyExtended(self, topology=topology, placement=InParts()))


def trained(strategy):
    """Train a small network, and return its losses, weights and what else was written."""
    random = np.random.default_rng(0)
    with strategy.scope():
        first = rx.Variable(random.normal(size=(4, 8)).astype("f"), name="first")
        second = rx.Variable(random.normal(size=(8, 4)).astype("f"), name="second")
        average = rx.Variable(np.zeros((4, 4), "f"), trainable=False, aggregation="MEAN")
        optimizer = rx.Optimizer(optax.adam(0.1))

    def step(x):
        def loss():
            return ((jnp.tanh(x @ first) @ second) ** 2).sum()

        value = optimizer.minimize(loss, [first, second])
        average.assign_add(x.T @ (x @ first @ second))
        return value

    losses = []
    for _ in range(3):
        x = strategy.split(random.normal(size=(8, 4)).astype("f"))
        losses.append(float(strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)))
    average.assign_sub(jnp.ones((4, 4)))
    return losses, [each.numpy() for each in (first, second, average)], (first, optimizer)


@pytest.mark.usefixtures("execution")
@pytest.mark.parametrize("replicas", [2, 4])
def test_divided_state_trains_as_mirrored_state_does(replicas):
    losses, weights, (first, optimizer) = trained(Divided(cpus(replicas)))
    expected_losses, expected, _ = trained(rx.MirroredStrategy(cpus(replicas)))
    equal(losses, expected_losses, 1e-5)
    for weight, same in zip(weights, expected, strict=True):
        equal(weight, same, 1e-5)
    slots = [slot for slot in optimizer.variables if slot.shape == first.shape]
    assert len(slots) == 2
    for variable in (first, *slots):
        shards = storage_of(variable).lift(first.strategy.topology).addressable_shards
        assert [shard.data.shape for shard in shards] == [(4, 8 // replicas)] * replicas
