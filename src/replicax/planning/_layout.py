"""The bytes of a device's memory that an array takes up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax.experimental.layout import Layout
    from jax.typing import DTypeLike


def shard_bytes(array: jax.ShapeDtypeStruct | jax.Array) -> int:
    """Return an array's bytes on one device; a `jax.ShapeDtypeStruct` will do."""
    shape = array.sharding.shard_shape(array.shape) if array.sharding else array.shape
    return _bytes(shape, array.dtype)


def padding(shape: Sequence[int], dtype: DTypeLike, layout: Layout) -> int:
    """Return how many bytes are added to an array that is laid out in tiles, as on TPUs.

    >>> from jax.experimental.layout import Layout
    >>> from replicax.planning._layout import padding
    >>> padding((2048, 10), "float32", Layout((1, 0), ((8, 128),)))
    49152
    """
    if not layout.tiling:
        return 0
    tile = layout.tiling[0]
    sides = [shape[axis] for axis in layout.major_to_minor]
    sides = [1] * (len(tile) - len(sides)) + sides
    for place, size in enumerate(reversed(tile), start=1):
        sides[-place] = math.ceil(sides[-place] / size) * size
    return _bytes(sides, dtype) - _bytes(shape, dtype)


def _bytes(shape: Sequence[int], dtype: DTypeLike) -> int:
    return math.prod(shape) * _item_bytes(dtype)


def _item_bytes(dtype: DTypeLike) -> int:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return 8  # the usual kind: two words
    return np.dtype(dtype).itemsize
