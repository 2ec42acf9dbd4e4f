"""Divisions: the dimension along which an array is divided over the replicas.

Inside a program every replica has its part. The functions that convert between parts and whole
arrays are jitted separately, so that their names can be found in a jaxpr.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec

from replicax._describing import described
from replicax.errors import InvalidArgument
from replicax.topology import REPLICA_AXIS

VariablePartitioner = Callable[[tuple[int, ...], np.dtype], Sequence[int]]

# Smaller variables stay whole: gathering one takes longer than its memory is worth.
_SMALL = 64 * 1024


@final
@dataclass(frozen=True, slots=True)
class Division:
    """One dimension of an array, divided into parts of equal size; the last ones may be padded.

    Args:
      axis: The dimension.
      size: Its size.
      parts: The number of parts.
    """

    axis: int
    size: int
    parts: int

    @property
    def chunk(self) -> int:
        """The size of a part along the axis."""
        return -(-self.size // self.parts)

    @property
    def padding(self) -> int:
        """The number of rows after the end that make the last parts as large as the others."""
        return self.chunk * self.parts - self.size

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(*[None] * self.axis, REPLICA_AXIS)

    def spec_with(self, logical: PartitionSpec) -> PartitionSpec:
        """Return the layout of parts that are divided over logical devices as well."""
        axes = [*logical, *[None] * (self.axis + 1 - len(logical))]
        own = axes[self.axis] or ()
        axes[self.axis] = (REPLICA_AXIS, *((own,) if isinstance(own, str) else own))
        return PartitionSpec(*axes) if logical else self.spec

    def part_of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a part of an array of `shape`."""
        return (*shape[: self.axis], self.chunk, *shape[self.axis + 1 :])

    def padded(self, array: jax.Array) -> jax.Array:
        if not self.padding:
            return array
        return jnp.pad(array, [(0, self.padding * (i == self.axis)) for i in range(array.ndim)])

    def unpadded(self, array: jax.Array) -> jax.Array:
        if not self.padding:
            return array
        return jax.lax.slice_in_dim(array, 0, self.size, axis=self.axis)


def division_of(
    shape: tuple[int, ...],
    dtype: np.dtype,
    parts: int,
    partitioner: VariablePartitioner | None = None,
    logical: tuple[int, ...] | None = None,
) -> Division | None:
    """Return the division of an array, or None if it stays whole.

    By default, an array of at least 64 KiB is divided along the largest dimension that is divisible
    by the number of parts or, if there is none, along the largest one.

    Args:
      shape: The shape of the array.
      dtype: Its dtype.
      parts: The number of parts.
      partitioner: Chooses the dimension instead.
      logical: The number of parts, per dimension, over the logical devices of each replica.
        Dimensions that these leave whole are preferred.
    """
    per_part = logical or (1,) * len(shape)
    # Random keys, which are not numbers, stay whole.
    if parts == 1 or not shape or not jnp.issubdtype(dtype, np.generic):
        return None
    if partitioner is not None:
        axis = _chosen_by(partitioner, shape, dtype)
    elif math.prod(shape) * jnp.dtype(dtype).itemsize < _SMALL:
        axis = None
    else:
        axes = range(len(shape))
        axis = max(axes, key=lambda i: (per_part[i] == 1, shape[i] % parts == 0, shape[i]))
    if axis is None or shape[axis] < 2 or not math.prod(shape):
        return None
    division = Division(axis, shape[axis], parts)
    return None if division.chunk % per_part[axis] else division


def _chosen_by(
    partitioner: VariablePartitioner, shape: tuple[int, ...], dtype: np.dtype
) -> int | None:
    """Return the dimension that `partitioner` divides into several parts, if there is one."""
    counts = partitioner(shape, dtype)
    fits = isinstance(counts, Sequence) and len(counts) == len(shape)
    fits = fits and all(_is_count(count) for count in counts)
    axes = [axis for axis, count in enumerate(counts) if count != 1] if fits else []
    if not fits or len(axes) > 1:
        raise InvalidArgument(
            "A `variable_partitioner` returns the number of parts for each dimension, of which at "
            f"most one is greater than 1; got {described(counts)} for a variable of shape {shape}."
        )
    return axes[0] if axes else None


def _is_count(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) > 0


_GATHER, _GATHER_ONCE = "replicax_gather", "replicax_gather_once"
_OWN_PART = "replicax_own_part"


@functools.partial(jax.jit, static_argnums=1)
def replicax_gather(part: jax.Array, division: Division) -> jax.Array:
    """Return the whole array of which this replica has a part."""
    whole = jax.lax.all_gather(part, REPLICA_AXIS, axis=division.axis, tiled=True)
    return division.unpadded(whole)


@functools.partial(jax.jit, static_argnums=1)
def replicax_gather_once(part: jax.Array, division: Division) -> jax.Array:
    """Return the whole array, which is kept for the backward pass."""
    return replicax_gather(part, division)


@functools.partial(jax.jit, static_argnums=1)
def replicax_own_part(whole: jax.Array, division: Division) -> jax.Array:
    """Return this replica's part of an array that all replicas have."""
    start = jax.lax.axis_index(REPLICA_AXIS) * division.chunk
    padded = division.padded(whole)
    return jax.lax.dynamic_slice_in_dim(padded, start, division.chunk, division.axis)


def part_of_sum(array: jax.Array, division: Division, *, scatters: bool) -> jax.Array:
    """Return this replica's part of the sum over the replicas.

    Args:
      array: What this replica adds to the sum.
      division: How the sum is divided.
      scatters: Whether reduce-scatters are right (`Topology.scatters_sums`).
    """
    if not scatters:
        return replicax_own_part(jax.lax.psum(array, REPLICA_AXIS), division)
    padded = division.padded(array)
    return jax.lax.psum_scatter(padded, REPLICA_AXIS, scatter_dimension=division.axis, tiled=True)


def gathers(equation: JaxprEqn) -> bool:
    """Tell whether an equation is a call of `replicax_gather`, or of `replicax_gather_once`."""
    return equation.params.get("name") in (_GATHER, _GATHER_ONCE)


def gathers_once(equation: JaxprEqn) -> bool:
    """Tell whether an equation is a call of `replicax_gather_once`."""
    return equation.params.get("name") == _GATHER_ONCE


def takes_own_part(equation: JaxprEqn) -> bool:
    """Tell whether an equation is a call of `replicax_own_part`."""
    return equation.params.get("name") == _OWN_PART


def division_by(equation: JaxprEqn, parts: int) -> Division:
    """Return the division with which one of these functions is called."""
    atoms: list[Any] = [*equation.invars, *equation.outvars]
    shapes = [atom.aval.shape for atom in atoms]
    whole = shapes[0] if takes_own_part(equation) else shapes[1]
    (axis,) = (axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1)
    return Division(axis, whole[axis], parts)
