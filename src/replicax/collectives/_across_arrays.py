"""Collectives between arrays that replicas have made already: eager execution."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.core import Tracer

from replicax import _context
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
from replicax.values import Mirrored, PerReplica, Shape, place, settle_shapes


@final
class AcrossArrays(Collectives):
    """Small programs over the mesh, each compiled once for the shapes it meets."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def reduce(
        self, op: ReduceOp, values: Sequence[PerReplica], options: CommunicationOptions
    ) -> list[Mirrored]:
        label = f"reduce {op.value}"
        for value in values:
            require_numeric(value, label)
        settle_shapes(values, label)
        for value in values:
            require_alike(value, label)
        if not values:
            return []
        if self._topology.num_replicas == 1:
            return [self._alone(op, value) for value in values]
        # One program for all values: 0.4 ms for the six gradients of a small network on two
        # devices, where summing them one by one on the first device takes 0.7 ms.
        scalars = tuple(value.scalars for value in values)
        program = _reduction(self._topology, op, scalars, options.dtype)
        arrays = [value.array(self._topology) for value in values]
        sums = self._launch(label, program, arrays)
        return [Mirrored.from_array(array, self._topology) for array in sums]

    def _launch(self, label: str, program: Any, arrays: list[jax.Array]) -> list[jax.Array]:
        # Where the results are is part of these programs, and gets lost under `jax.disable_jit`.
        with jax.disable_jit(False):
            return launch(self._topology, label, program, arrays)

    def _alone(self, op: ReduceOp, value: PerReplica) -> Mirrored:
        array = jnp.asarray(value.component(0))
        return Mirrored([array.astype(result_dtype(op, array.dtype))], self._topology)

    def gather(self, value: PerReplica, axis: int, options: CommunicationOptions) -> Mirrored:
        require_numeric(value, "gather")
        settle_shapes([value], f"gather along axis {axis}")
        require_gatherable(value, axis)
        axis = int(axis)
        if isinstance(value.array(self._topology) if value.uniform else None, Tracer):
            return self.mirror(jnp.concatenate(value.values, axis=axis))
        if self._topology.spans_processes:
            return self._gather_from_workers(value, axis)
        # On the first device: the components may differ in size along the axis, and would need a
        # program for every combination of sizes.
        first = self._topology.local_homes[0]
        parts = [place(component, first) for component in value.values]
        return self.mirror(jnp.concatenate(parts, axis=axis))

    def _gather_from_workers(self, value: PerReplica, axis: int) -> Mirrored:
        """Components travel at the size of the largest, one program for all that have that size."""
        sizes = [shape[axis] for shape in value.shapes]
        longest = max(sizes)

        def padded(component: Any) -> jax.Array:
            array = jnp.asarray(component)
            missing = [(0, longest - array.shape[d] if d == axis else 0) for d in range(array.ndim)]
            return jnp.pad(array, missing)[None]

        def padded_shape(shape: Shape) -> Shape:
            return (1, *shape[:axis], longest, *shape[axis + 1 :])

        stacked = value.map(padded, padded_shape).array(self._topology)
        program = _replication(self._topology)
        (everything,) = self._launch(f"gather along axis {axis}", program, [stacked])
        local = everything.addressable_data(0)
        parts = [
            jax.lax.slice_in_dim(local[replica], 0, size, axis=axis)
            for replica, size in enumerate(sizes)
        ]
        return self.mirror(jnp.concatenate(parts, axis=axis))

    def broadcast(self, value: PerReplica) -> Mirrored:
        if not self._topology.spans_processes or isinstance(value.primary, Tracer):
            return self.mirror(value.primary)
        settle_shapes([value], "broadcast")
        stacked = value.map(lambda c: jnp.asarray(c)[None], lambda shape: (1, *shape))
        program = _first_of_all(self._topology)
        (first,) = self._launch("broadcast", program, [stacked.array(self._topology)])
        return self.as_mirrored(first)

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
        if _context.current().program is not None:  # one for the replicas of all workers
            return PerReplica.stacked(jnp.stack(values), topology)
        parts = [
            place(values[replica], home)
            for replica, home in zip(topology.local_replicas, topology.local_homes, strict=True)
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
        if not array.size:  # which needs no sum
            return jnp.zeros(array.shape[1:], dtype)
        wire = options.wire_dtype(dtype)
        total = jnp.sum(array.astype(wire), axis=0, dtype=wire).astype(dtype)
        return total / replicas if op is ReduceOp.MEAN else total

    def program(arrays: list[jax.Array]) -> list[jax.Array]:
        return [combine(array, scalar) for array, scalar in zip(arrays, scalars, strict=True)]

    return jax.jit(program, out_shardings=topology.replicated)


@functools.lru_cache(maxsize=64)
def _replication(topology: Topology) -> Any:
    """A program that brings global arrays to every device."""
    return jax.jit(lambda arrays: arrays, out_shardings=topology.replicated)


@functools.lru_cache(maxsize=64)
def _first_of_all(topology: Topology) -> Any:
    """A program that brings the first rows of global arrays to every device."""
    return jax.jit(lambda arrays: [a[0] for a in arrays], out_shardings=topology.replicated)
