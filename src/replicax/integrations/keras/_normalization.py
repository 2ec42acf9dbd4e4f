"""`BatchNormalization(synchronized=True)`, which Keras supports on TensorFlow only."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras

from replicax import _context
from replicax._typing import Nest
from replicax.integrations.keras._patches import Patches
from replicax.integrations.keras._private import replace_moments
from replicax.strategies import get_replica_context


def install(patches: Patches) -> None:
    """Wrap the layer's constructor and the method that computes its statistics."""
    layer = keras.layers.BatchNormalization
    patches.replace(layer, "__init__", _accepting)
    replace_moments(patches, layer, _synchronized)


def _accepting(init: Callable[..., None]) -> Callable[..., None]:
    """Accept `synchronized=True`, which Keras refuses unless its backend is TensorFlow."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def __init__(self: Any, *args: Nest, **kwargs: Nest) -> None:  # noqa: N807
        bound = signature.bind(self, *args, **kwargs)
        synchronized = bool(bound.arguments.pop("synchronized", False))
        init(*bound.args, **bound.kwargs)
        self.synchronized = synchronized

    # Keras inspects the arguments of constructors in two ways, one of which ignores wrappers.
    setattr(__init__, "__signature__", signature)  # noqa: B010  functions do not declare it
    return __init__


def _synchronized(moments: Callable[..., Any], layer: Any, inputs: Nest, mask: Any) -> object:
    """Return mean and variance over all replicas, or over the batch if there are none.

    In `fit` there are none, and the batch is the global batch.
    """
    axes = tuple(axis for axis in range(inputs.ndim) if axis != layer.axis % inputs.ndim)
    replica = get_replica_context()
    if replica is None or _context.current().strategy is None:
        if mask is None:
            return keras.ops.moments(inputs, axes)
        return moments(layer, inputs, mask)  # Keras' code for masks ignores `synchronized`.
    own = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
    counted = jnp.ones((1,) * own.ndim, own.dtype) if mask is None else mask[..., None]
    counted = jnp.broadcast_to(counted, own.shape).astype(own.dtype)
    shape = [1] * own.ndim
    shape[layer.axis] = own.shape[layer.axis]
    total, count = replica.all_reduce("SUM", [jnp.sum(own * counted, axes), jnp.sum(counted, axes)])
    count = count if mask is None else count + keras.config.epsilon()  # as in Keras
    mean = total / count
    # A second sum, because the difference of two large numbers would lose digits.
    squares = jnp.sum((own - mean.reshape(shape)) ** 2 * counted, axes)
    variance = replica.all_reduce("SUM", squares) / count
    return mean.astype(inputs.dtype), variance.astype(inputs.dtype)
