"""Collectives inside the part of a program that every replica runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from replicax._enums import ReduceOp
from replicax._jax_compat import all_gather
from replicax.collectives._interface import (
    Collectives,
    require_gatherable,
    require_numeric,
    require_scatterable,
)
from replicax.collectives._options import CommunicationOptions
from replicax.collectives._packing import PackRules, in_packs
from replicax.collectives._reductions import Axes, Reduction, reduction_of
from replicax.topology import REPLICA_AXIS, Topology
from replicax.values import Mirrored, PerReplica


@final
class InProgram(Collectives):
    """Collectives among replicas that each have their own component; XLA does the rest.

    `uneven` means that the code may be that of one of several variants, whose shapes differ.
    """

    def __init__(self, topology: Topology, *, uneven: bool = False) -> None:
        self._topology = topology
        self._uneven = uneven

    def reduce(
        self, op: ReduceOp, values: Sequence[PerReplica], options: CommunicationOptions
    ) -> list[Mirrored]:
        reduction = reduction_of(op)
        arrays, dtypes = self._arrays(f"reduce {op.value}", reduction, values)
        narrow = [
            array.astype(options.wire_dtype(dtype))
            for array, dtype in zip(arrays, dtypes, strict=True)
        ]
        combined = self._across(reduction, narrow, options)
        return [
            self.as_mirrored(self._finished(reduction, array, dtype))
            for array, dtype in zip(combined, dtypes, strict=True)
        ]

    def reduce_scatter(
        self, op: ReduceOp, values: Sequence[PerReplica], axis: int, options: CommunicationOptions
    ) -> list[PerReplica]:
        reduction, label = reduction_of(op), f"reduce_scatter {op.value} along axis {axis}"
        arrays, dtypes = self._arrays(label, reduction, values)
        for value in values:
            require_scatterable(value, axis, self._topology.num_replicas)
        parts = [
            self._part(reduction, array.astype(options.wire_dtype(dtype)), axis, options)
            for array, dtype in zip(arrays, dtypes, strict=True)
        ]
        return [
            PerReplica.from_array(
                self._finished(reduction, part, dtype), self._topology, inside=True
            )
            for part, dtype in zip(parts, dtypes, strict=True)
        ]

    def _arrays(
        self, label: str, reduction: Reduction, values: Sequence[PerReplica]
    ) -> tuple[list[jax.Array], list[Any]]:
        """Return this replica's components, and the dtypes of their results."""
        for value in values:
            require_numeric(value, label, reduction)
        arrays = [jnp.asarray(value.component(0)) for value in values]
        return arrays, [reduction.dtype(array.dtype) for array in arrays]

    def _finished(
        self, reduction: Reduction, combined: jax.Array, dtype: DTypeLike | None
    ) -> jax.Array:
        return reduction.finished(combined.astype(dtype), self._topology.num_replicas)

    def _part(
        self, reduction: Reduction, array: jax.Array, axis: int, options: CommunicationOptions
    ) -> jax.Array:
        """Return this replica's part, along `axis`, of the combined value."""
        topology = self._topology
        can_scatter = topology.scatters_sums and topology.logical_devices_per_replica == 1
        if reduction.scatter is not None and can_scatter and array.size:
            return reduction.scatter(array, REPLICA_AXIS, axis)
        (whole,) = self._across(reduction, [array], options)
        size = array.shape[axis] // topology.num_replicas
        start = jax.lax.axis_index(REPLICA_AXIS) * size
        return jax.lax.dynamic_slice_in_dim(whole, start, size, axis)

    def _across(
        self, reduction: Reduction, arrays: list[jax.Array], options: CommunicationOptions
    ) -> list[jax.Array]:
        # An empty array needs no communication.
        nonempty = [array for array in arrays if array.size]
        combined = iter(self._across_nonempty(reduction, nonempty, options))
        return [next(combined) if array.size else array for array in arrays]

    def _across_nonempty(
        self, reduction: Reduction, arrays: list[jax.Array], options: CommunicationOptions
    ) -> list[jax.Array]:
        topology = self._topology
        if topology.logical_devices_per_replica == 1:
            rules = PackRules.of(topology, options.bytes_per_pack)
            return in_packs(lambda array: reduction.over(array, REPLICA_AXIS), arrays, rules)
        if topology.num_replicas == 1:  # XLA refuses to sum a single divided array
            return arrays
        # Packing would first gather arrays that are divided; XLA joins these sums by itself.
        return [self._across_parts(reduction, array) for array in arrays]

    def _across_parts(self, reduction: Reduction, array: jax.Array) -> jax.Array:
        # XLA:CPU aborts the process for bfloat16 when replicas have several devices.
        narrow = array.dtype == jnp.bfloat16 and self._topology.on_cpus
        wide = array.astype(jnp.float32) if narrow else array
        return reduction.over(wide, REPLICA_AXIS).astype(array.dtype)

    def _require_elements(self, op: ReduceOp, value: PerReplica, axes: Axes) -> None:
        if not self._uneven:  # otherwise other variants may have some
            super()._require_elements(op, value, axes)

    def _count(self, value: PerReplica, axes: Axes) -> int | jax.Array:
        if not self._uneven:
            return super()._count(value, axes)
        own = math.prod(value.samples()[0].shape[axis] for axis in axes)
        return jax.lax.psum(jnp.asarray(own), REPLICA_AXIS)

    def gather(self, value: PerReplica, axis: int, options: CommunicationOptions) -> Mirrored:
        require_numeric(value, "gather")
        require_gatherable(value, axis)
        own = value.component(0)
        return self.as_mirrored(jax.lax.all_gather(own, REPLICA_AXIS, axis=int(axis), tiled=True))

    def broadcast(self, value: PerReplica) -> Mirrored:
        return self.as_mirrored(all_gather(value.component(0), REPLICA_AXIS)[0])

    def mirror(self, value: object) -> Mirrored:
        return value if isinstance(value, Mirrored) else self.as_mirrored(jnp.asarray(value))

    def as_mirrored(self, array: jax.Array) -> Mirrored:
        return Mirrored.from_array(array, self._topology, inside=True)

    def distribute(self, values: Sequence[Any]) -> PerReplica:
        own = jnp.stack(values)[jax.lax.axis_index(REPLICA_AXIS)]
        return PerReplica.from_array(own, self._topology, inside=True)
