"""The table of reductions: everything that one `ReduceOp` means, used by all collectives."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._enums import ReduceOp
from replicax.errors import InvalidArgument

Axes = tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Reduction:
    """The meaning of one `ReduceOp`.

    Args:
      combine: Combines an array along axes that have elements. Its gradient is that of the op,
        unless that `chooses`.
      identity: Returns, for a dtype, the number that changes nothing: the share of a replica
        without rows.
      dtype: Returns the dtype of the result, given that of the values.
      kinds: The kinds of dtypes that can be combined.
      across: Combines the arrays of all replicas in a program, by the name of the replica axis.
        Without it, they are gathered and combined on every replica.
      scatter: Does the same, but leaves each replica its part along a dimension. Without it, each
        replica takes its part of what `across` returns.
      finalize: Computes the result from the combined values and their number.
      parts: The op that combines results for parts of the values, before `finalize`; by default,
        the same op.
      parts_dtype: Returns the dtype of results for parts, given that of the values; by default,
        `dtype`.
      linear: Whether the gradient is the same reduction of the replicas' gradients.
      repeatable: Whether a value combined with itself is that value.
      needs_elements: Whether a result needs at least one element.
      chooses: Whether the result is one of the values, which share the gradient if they are equal.
    """

    combine: Callable[[jax.Array, Axes], jax.Array]
    identity: Callable[[Any], Any]
    dtype: Callable[[np.dtype], np.dtype] = jnp.dtype
    kinds: tuple[type, ...] = (jnp.number, jnp.bool_)
    across: Callable[[jax.Array, str], jax.Array] | None = None
    scatter: Callable[[jax.Array, str, int], jax.Array] | None = None
    finalize: Callable[[jax.Array, Any], jax.Array] | None = None
    parts: ReduceOp | None = None
    parts_dtype: Callable[[np.dtype], np.dtype] | None = None
    linear: bool = False
    repeatable: bool = False
    needs_elements: bool = False
    chooses: bool = False

    def part(self, array: jax.Array, axes: Axes) -> jax.Array:
        """Return one replica's contribution to a reduction over `axes`, even if it has no rows.

        The contribution is not finalized.
        """
        array = array.astype((self.parts_dtype or self.dtype)(array.dtype))
        if all(array.shape[axis] for axis in axes):
            return self.combine(array, axes)
        rest = [size for axis, size in enumerate(array.shape) if axis not in axes]
        return jnp.full(rest, self.identity(array.dtype), array.dtype)

    def whole(self, array: jax.Array, axes: Axes) -> jax.Array:
        """Return the final result of reducing one array over `axes`."""
        count = math.prod(array.shape[axis] for axis in axes)
        wide = array.astype((self.parts_dtype or self.dtype)(array.dtype))
        return self.finished(self.combine(wide, axes), count).astype(self.dtype(array.dtype))

    def over(self, array: jax.Array, axis_name: str) -> jax.Array:
        """Combine the values of all replicas, in a program. The result is not finalized."""
        if self.across is None:
            return self.combine(jax.lax.all_gather(array, axis_name), (0,))
        return self.across(array, axis_name)

    def finished(self, combined: jax.Array, count: object) -> jax.Array:
        """Return the final result of a combination of `count` values."""
        return combined if self.finalize is None else self.finalize(combined, count)

    def gradient(self, components: jax.Array, cotangent: jax.Array) -> jax.Array:
        """Return the gradients of all replicas, stacked like their components."""
        if self.chooses:
            # NaNs are what was chosen. `jnp.max` has no gradient there: it divides zero by zero.
            chosen = (components == self.combine(components, (0,))) | jnp.isnan(components)
            return cotangent * chosen / chosen.sum(0)
        _, pullback = jax.vjp(lambda stacked: self.combine(stacked, (0,)), components)
        return pullback(cotangent)[0]


def reduction_of(op: ReduceOp) -> Reduction:
    """Return the row of the table for `op`; raise if there is none."""
    found = REDUCTIONS.get(op)
    if found is None:
        known = ", ".join(each.value for each in REDUCTIONS)
        raise InvalidArgument(f"There is no reduction for {op!r}. Use one of {known}.")
    return found


def _sum(array: jax.Array, axes: Axes) -> jax.Array:
    return jnp.sum(array, axis=axes, dtype=array.dtype)  # never in a wider type


def _scattered_sum(array: jax.Array, axis_name: str, dimension: int) -> jax.Array:
    return jax.lax.psum_scatter(array, axis_name, scatter_dimension=dimension, tiled=True)


def _zero(dtype: object) -> int:
    return 0


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of a sum: an integer one for booleans, whose sum is a count."""
    return jnp.dtype(jnp.int32) if dtype == jnp.bool_ else dtype


def _mean_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of a mean: a floating-point one for integers."""
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)


def _mean_parts_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which a mean's elements are added up: a sum in float16 can overflow."""
    dtype = _mean_dtype(dtype)
    return jnp.promote_types(dtype, jnp.float32) if dtype.itemsize < 4 else dtype


# XLA's maximum and minimum over CPU devices drop NaNs (jaxlib 0.10.1): for [nan, 1] on two devices,
# the maximum is 1. `jnp.max` keeps NaNs, so these are looked for separately.


def _max(array: jax.Array, axes: Axes) -> jax.Array:
    return _with_nans(jnp.max(array, axis=axes), array, lambda nans: jnp.any(nans, axis=axes))


def _min(array: jax.Array, axes: Axes) -> jax.Array:
    return _with_nans(jnp.min(array, axis=axes), array, lambda nans: jnp.any(nans, axis=axes))


def _max_across(array: jax.Array, axis_name: str) -> jax.Array:
    return _with_nans(jax.lax.pmax(array, axis_name), array, _any_across(axis_name))


def _min_across(array: jax.Array, axis_name: str) -> jax.Array:
    return _with_nans(jax.lax.pmin(array, axis_name), array, _any_across(axis_name))


def _any_across(axis_name: str) -> Callable[[jax.Array], jax.Array]:
    return lambda flags: jax.lax.psum(flags.astype(jnp.int32), axis_name) > 0


def _with_nans(
    result: jax.Array, array: jax.Array, any_of: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return result
    return jnp.where(any_of(jnp.isnan(array)), jnp.nan, result)


def _limit(dtype: np.dtype, sign: int) -> object:
    """Return the largest number of a dtype, or with a negative sign the smallest."""
    if dtype == jnp.bool_:
        return sign > 0
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).max if sign > 0 else jnp.iinfo(dtype).min
    infinite = np.asarray(sign * np.inf).astype(dtype)
    # Some 8-bit types have no infinity.
    return infinite if np.isinf(infinite) else sign * jnp.finfo(dtype).max


_ORDERED = (jnp.integer, jnp.floating, jnp.bool_)

REDUCTIONS: dict[ReduceOp, Reduction] = {
    ReduceOp.SUM: Reduction(
        combine=_sum,
        identity=_zero,
        dtype=_sum_dtype,
        across=jax.lax.psum,
        scatter=_scattered_sum,
        linear=True,
    ),
    ReduceOp.MEAN: Reduction(
        combine=_sum,
        identity=_zero,
        dtype=_mean_dtype,
        across=jax.lax.psum,
        scatter=_scattered_sum,
        finalize=operator.truediv,
        parts=ReduceOp.SUM,
        parts_dtype=_mean_parts_dtype,
        linear=True,
        repeatable=True,
    ),
    ReduceOp.MAX: Reduction(
        combine=_max,
        identity=lambda dtype: _limit(dtype, -1),
        kinds=_ORDERED,
        across=_max_across,
        repeatable=True,
        needs_elements=True,
        chooses=True,
    ),
    ReduceOp.MIN: Reduction(
        combine=_min,
        identity=lambda dtype: _limit(dtype, 1),
        kinds=_ORDERED,
        across=_min_across,
        repeatable=True,
        needs_elements=True,
        chooses=True,
    ),
}
