"""Collectives inside the part of a program that every replica runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax._enums import ReduceOp
from replicax._jax_compat import all_gather
from replicax.collectives._interface import (
    Collectives,
    require_gatherable,
    require_numeric,
    result_dtype,
)
from replicax.collectives._options import CommunicationOptions
from replicax.collectives._packing import PackRules, in_packs
from replicax.topology import REPLICA_AXIS, Topology
from replicax.values import Mirrored, PerReplica


@final
class InProgram(Collectives):
    """Each replica has its own component in hand; XLA does the rest.

    `uneven`: the code may be that of one of several variants, and the others' shapes differ.
    """

    def __init__(self, topology: Topology, *, uneven: bool = False) -> None:
        self._topology = topology
        self._uneven = uneven

    def reduce(
        self, op: ReduceOp, values: Sequence[PerReplica], options: CommunicationOptions
    ) -> list[Mirrored]:
        for value in values:
            require_numeric(value, f"reduce {op.value}")
        arrays = [jnp.asarray(value.component(0)) for value in values]
        dtypes = [result_dtype(op, array.dtype) for array in arrays]
        narrow = [
            array.astype(options.wire_dtype(dtype))
            for array, dtype in zip(arrays, dtypes, strict=True)
        ]
        sums = self._sums(narrow, options)
        scale = self._topology.num_replicas if op is ReduceOp.MEAN else 1
        return [
            self.as_mirrored(total.astype(dtype) / scale if scale > 1 else total.astype(dtype))
            for total, dtype in zip(sums, dtypes, strict=True)
        ]

    def _sums(self, arrays: list[jax.Array], options: CommunicationOptions) -> list[jax.Array]:
        # An empty array needs no sum.
        sums = iter(self._sums_of_nonempty([array for array in arrays if array.size], options))
        return [next(sums) if array.size else array for array in arrays]

    def _sums_of_nonempty(
        self, arrays: list[jax.Array], options: CommunicationOptions
    ) -> list[jax.Array]:
        topology = self._topology
        if topology.logical_devices_per_replica == 1:
            rules = PackRules.of(topology, options.bytes_per_pack)
            return in_packs(lambda array: jax.lax.psum(array, REPLICA_AXIS), arrays, rules)
        if topology.num_replicas == 1:  # a sum of one array in parts is refused by XLA
            return arrays
        # A pack would have to gather arrays that are divided; XLA joins these sums by itself.
        return [self._sum_of_parts(array) for array in arrays]

    def _sum_of_parts(self, array: jax.Array) -> jax.Array:
        # XLA:CPU aborts the process for bfloat16, among replicas of several devices.
        narrow = array.dtype == jnp.bfloat16 and self._topology.on_cpus
        wide = array.astype(jnp.float32) if narrow else array
        return jax.lax.psum(wide, REPLICA_AXIS).astype(array.dtype)

    def _count(self, value: PerReplica, axes: tuple[int, ...]) -> int | jax.Array:
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

    def mirror(self, value: Any) -> Mirrored:
        return value if isinstance(value, Mirrored) else self.as_mirrored(jnp.asarray(value))

    def as_mirrored(self, array: jax.Array) -> Mirrored:
        return Mirrored.from_array(array, self._topology, inside=True)

    def distribute(self, values: Sequence[Any]) -> PerReplica:
        own = jnp.stack(values)[jax.lax.axis_index(REPLICA_AXIS)]
        return PerReplica.from_array(own, self._topology, inside=True)
