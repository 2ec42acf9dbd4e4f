"""The workers' parts of divided variables, which each worker saves and restores by itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from replicax.variables._divided_storage import Divided
from replicax.variables._state import reusing_states, set_state
from replicax.variables._variable import Variable, storage_of

Ranges = list[tuple[int, int]]


@final
@dataclass(frozen=True, slots=True)
class Part:
    """A range of an array along one dimension, and all of it along the others.

    Args:
      axis: The dimension.
      start: The first index.
      stop: The index after the last one.
    """

    axis: int
    start: int
    stop: int

    def ranges(self, shape: Sequence[int]) -> Ranges:
        """Return the range of each dimension of an array of `shape`."""
        ranges = [(0, size) for size in shape]
        ranges[self.axis] = (self.start, self.stop)
        return ranges


@final
@dataclass(frozen=True, slots=True)
class WorkerParts:
    """Each worker's part of a variable.

    Args:
      axis: The dimension along which it is divided.
      bounds: The indices at which the parts begin, in the order of the workers, and the last ends.
    """

    axis: int
    bounds: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def of(self, worker: int) -> Part:
        """Return the part of a worker."""
        return Part(self.axis, *self.bounds[worker : worker + 2])


def worker_parts(variable: Variable) -> WorkerParts | None:
    """Return the workers' parts of a variable, or None if not every worker has one part.

    A variable that is divided only over the devices of this process is one part.
    """
    storage = storage_of(variable)
    if not isinstance(storage, Divided):
        return None
    division, topology = storage.division, storage.topology
    if topology.logical_devices_per_replica > 1:
        return None
    if not topology.spans_processes:
        return WorkerParts(division.axis, (0, division.size))
    owners = [devices[0].process_index for devices in topology.devices]
    if owners != sorted(owners):  # workers' parts are in several pieces
        return None
    replicas = (owners.count(worker) for worker in range(jax.process_count()))
    ends = itertools.accumulate(replicas, initial=0)
    return WorkerParts(division.axis, tuple(min(n * division.chunk, division.size) for n in ends))


def own_part(variable: Variable) -> np.ndarray:
    """Return a copy of this worker's part of a divided variable, without padding."""
    storage = storage_of(variable)
    assert isinstance(storage, Divided)
    axis = storage.division.axis
    with reusing_states:
        shards = storage.lift(storage.topology).addressable_shards
        shards = sorted(shards, key=lambda shard: shard.index[axis].start or 0)
        numbers = np.concatenate([np.asarray(shard.data) for shard in shards], axis)
    start, stop = _own_range(variable)
    return np.take(numbers, range(stop - start), axis) if storage.division.padding else numbers


def store_own_part(variable: Variable, numbers: np.ndarray) -> None:
    """Store this worker's part of a divided variable; every worker must store its own."""
    storage = storage_of(variable)
    assert isinstance(storage, Divided)
    division, topology = storage.division, storage.topology
    begin, _ = _own_range(variable)

    def shard(index: Any) -> np.ndarray:
        start = (index[division.axis].start or 0) - begin
        taken = [slice(None)] * division.axis + [slice(start, start + division.chunk)]
        rows = numbers[tuple(taken)]
        lacking = division.chunk - rows.shape[division.axis]
        return np.pad(rows, [(0, lacking * (i == division.axis)) for i in range(rows.ndim)])

    shape = storage.array_shape(inside=False, topology=None)
    parts = jax.make_array_from_callback(shape, storage.sharding(topology), shard)
    set_state(variable, storage.rewrap(parts, topology))


def _own_range(variable: Variable) -> tuple[int, int]:
    parts = worker_parts(variable)
    assert parts is not None
    own = parts.of(jax.process_index() if parts.count > 1 else 0)
    return own.start, own.stop
