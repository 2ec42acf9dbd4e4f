"""Losses of replicas whose sum is the loss of the global batch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.core import Tracer

from replicax import _context
from replicax._typing import ArrayLike
from replicax._weights import real_array, weights_for
from replicax.errors import ContextError, InvalidArgument, ShapeMismatch
from replicax.strategies import get_strategy, has_strategy, in_cross_replica_context


def compute_average_loss(
    per_example_loss: ArrayLike | object,
    sample_weight: ArrayLike | object = None,
    global_batch_size: int | ArrayLike | None = None,
) -> jax.Array:
    """Return this replica's part of the average loss of the global batch.

    The parts of all replicas add up to what one device computes for the whole batch, and so do
    their gradients, which `apply_gradients` sums. Call it in the function given to `run`.

    Args:
      per_example_loss: The losses of this replica's examples, one per example (or more: all
        elements are added).
      sample_weight: Weights: one for all, one per example, or one per element.
      global_batch_size: The number of examples on all replicas. By default this replica's number
        times the number of replicas; give it where shares of a batch may differ in size.

    >>> import numpy as np, replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> losses = strategy.run(lambda: rx.compute_average_loss(np.float32([1, 2, 3])))
    >>> strategy.reduce("SUM", losses, axis=None)
    Array(2., dtype=float32)
    """
    method = "compute_average_loss"
    losses = real_array(per_example_loss, method, "per_example_loss")
    if losses.ndim == 0:
        raise ShapeMismatch(
            f"`per_example_loss` of `{method}` must have one loss per example; got a scalar of "
            f"dtype {losses.dtype}. Leave out the mean or the sum that was made of the losses."
        )
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        losses = losses.astype(jnp.result_type(float))
    if sample_weight is not None:
        losses = losses * weights_for(losses, sample_weight, method)
    if global_batch_size is None:
        _require_replica_context(method, " or pass `global_batch_size`")
        global_batch_size = losses.shape[0] * get_strategy().num_replicas_in_sync
    size = _batch_size(global_batch_size)
    # At least float32: a batch of 70 000 is infinite in float16.
    wide = jnp.promote_types(losses.dtype, jnp.float32)
    total, size = jnp.sum(losses, dtype=wide), size.astype(wide)
    # If no replica has an example, the average is 0, like the sum.
    return jnp.where(size == 0, 0, total / jnp.where(size == 0, 1, size)).astype(losses.dtype)


def scale_regularization_loss(regularization_loss: ArrayLike | object) -> jax.Array:
    """Return this replica's part of a regularization loss: an equal share of the sum.

    Every replica computes the whole loss from the same weights, and the parts add up to it. Call
    this in the function given to `run`.

    Args:
      regularization_loss: The loss; the elements of an array are added.

    >>> import numpy as np, replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> losses = strategy.run(lambda: rx.scale_regularization_loss(np.float32([1, 2])))
    >>> strategy.reduce("SUM", losses, axis=None)
    Array(3., dtype=float32)
    """
    method = "scale_regularization_loss"
    loss = real_array(regularization_loss, method, "regularization_loss")
    _require_replica_context(method, "")
    return jnp.sum(loss) / get_strategy().num_replicas_in_sync


def _require_replica_context(method: str, otherwise: str) -> None:
    if has_strategy() and in_cross_replica_context():
        raise ContextError(
            f"`{method}` computes one replica's part of a loss. Current context: "
            f"{_context.current()}. Call it in the function given to `run`{otherwise}."
        )


def _batch_size(size: object) -> jax.Array:
    """Return the number of examples; refuse anything else. A traced one may have any value."""
    array = real_array(size, "compute_average_loss", "global_batch_size")
    whole = jnp.issubdtype(array.dtype, jnp.integer) and array.ndim == 0
    if not whole or (not isinstance(array, Tracer) and int(array) < 0):
        given = int(array) if whole else f"{array.dtype}{[*array.shape]}"
        raise InvalidArgument(
            "`global_batch_size` of `compute_average_loss` must be a whole number that is not "
            f"negative; got {given}. Pass the number of examples on all replicas."
        )
    return array
