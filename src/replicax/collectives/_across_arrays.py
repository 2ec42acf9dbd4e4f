"""Collectives between arrays that replicas have made already: eager execution."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from replicax._enums import ReduceOp
from replicax.collectives._dispatch import launch
from replicax.collectives._interface import (
    Collectives,
    require_alike,
    require_gatherable,
    require_numeric,
    result_dtype,
)
from replicax.collectives._options import CommunicationOptions
from replicax.topology import Topology
from replicax.values import Mirrored, PerReplica, place


@final
class AcrossArrays(Collectives):
    """Small programs over the mesh, each compiled once for the shapes it meets."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def reduce(
        self, op: ReduceOp, values: Sequence[PerReplica], options: CommunicationOptions
    ) -> list[Mirrored]:
        for value in values:
            require_numeric(value, f"reduce {op.value}")
            require_alike(value, f"reduce {op.value}")
        if not values:
            return []
        if self._topology.num_replicas == 1:
            return [self._alone(op, value) for value in values]
        # One program for all values: 0.4 ms for the six gradients of a small network on two
        # devices, where summing them one by one on the first device takes 0.7 ms.
        scalars = tuple(value.scalars for value in values)
        program = _reduction(self._topology, op, scalars, options.dtype)
        arrays = [value.array(self._topology) for value in values]
        sums = launch(self._topology, program, arrays)
        return [Mirrored.from_array(array, self._topology) for array in sums]

    def _alone(self, op: ReduceOp, value: PerReplica) -> Mirrored:
        array = jnp.asarray(value.component(0))
        return Mirrored([array.astype(result_dtype(op, array.dtype))], self._topology)

    def gather(self, value: PerReplica, axis: int, options: CommunicationOptions) -> Mirrored:
        require_numeric(value, "gather")
        require_gatherable(value, axis)
        if isinstance(value.array(self._topology) if value.uniform else None, Tracer):
            return self.mirror(jnp.concatenate(value.values, axis=int(axis)))
        # On the first device: the components may differ in size along the axis, and would need a
        # program for every combination of sizes.
        first = self._topology.local_devices[0]
        parts = [place(component, first) for component in value.values]
        return self.mirror(jnp.concatenate(parts, axis=int(axis)))

    def broadcast(self, value: PerReplica) -> Mirrored:
        return self.mirror(value.primary)

    def count(self, value: PerReplica, axes: tuple[int, ...]) -> int:
        sizes = [math.prod(np.shape(x)[axis] for axis in axes) for x in value.samples()]
        return sum(sizes) if len(sizes) > 1 else sizes[0] * self._topology.num_replicas

    def mirror(self, value: Any) -> Mirrored:
        if isinstance(value, Mirrored):
            if value.topology == self._topology:
                return value
            value = value.primary
        return self.as_mirrored(self._topology.replicate(value))

    def as_mirrored(self, array: jax.Array) -> Mirrored:
        return Mirrored.from_array(array, self._topology)

    def distribute(self, values: Sequence[Any]) -> PerReplica:
        topology = self._topology
        parts = [
            place(values[replica], device)
            for replica, device in zip(topology.local_replicas, topology.local_devices, strict=True)
        ]
        return PerReplica(parts, topology)


@functools.lru_cache(maxsize=1024)
def _reduction(
    topology: Topology, op: ReduceOp, scalars: tuple[bool, ...], wire_dtype: str | None
) -> Any:
    """A program that combines global arrays over the replicas."""
    replicas = topology.num_replicas
    options = CommunicationOptions(dtype=wire_dtype)

    def combine(array: jax.Array, scalar: bool) -> jax.Array:
        if not scalar:
            array = array.reshape(replicas, array.shape[0] // replicas, *array.shape[1:])
        dtype = result_dtype(op, array.dtype)
        wire = options.wire_dtype(dtype)
        total = jnp.sum(array.astype(wire), axis=0, dtype=wire).astype(dtype)
        return total / replicas if op is ReduceOp.MEAN else total

    def program(arrays: list[jax.Array]) -> list[jax.Array]:
        return [combine(array, scalar) for array, scalar in zip(arrays, scalars, strict=True)]

    return jax.jit(program, out_shardings=topology.replicated)
