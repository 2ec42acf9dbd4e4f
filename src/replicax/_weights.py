"""Numbers and their sample weights, as losses and metrics take them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from replicax.errors import InvalidType, ShapeMismatch


def real_array(value: object, method: str, argument: str) -> jax.Array:
    """Return an argument as an array of real numbers; refuse anything else."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError):
        array = None
    if array is None or not (
        jnp.issubdtype(array.dtype, jnp.bool_)
        or jnp.issubdtype(array.dtype, jnp.integer)
        or jnp.issubdtype(array.dtype, jnp.floating)
    ):
        kind = f"a {type(value).__name__}" if array is None else f"{array.dtype}{[*array.shape]}"
        raise InvalidType(
            f"`{argument}` of `{method}` must be an array of real numbers; got {kind}. Pass an "
            "array, or a number."
        )
    return array


def weights_for(values: jax.Array, sample_weight: object, method: str) -> jax.Array:
    """Return the weights of all elements of `values`, in its shape and dtype.

    Weights with fewer dimensions apply to the leading ones: one weight per row is the weight of
    every element of that row.
    """
    weights = real_array(sample_weight, method, "sample_weight").astype(values.dtype)
    shape = weights.shape + (1,) * (values.ndim - weights.ndim)
    try:
        fits = np.broadcast_shapes(shape, values.shape) == values.shape
    except ValueError:
        fits = False
    if not fits:
        raise ShapeMismatch(
            f"`sample_weight` of `{method}` has shape {weights.shape}, which does not fit values "
            f"of shape {values.shape}. Give one weight for all, one per row, or one per element."
        )
    return jnp.broadcast_to(weights.reshape(shape), values.shape)
