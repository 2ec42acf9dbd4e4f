"""Partitioners for `variable_partitioner`: they decide into how many parts to divide variables."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import jax.numpy as jnp

from replicax._describing import described
from replicax.errors import InvalidArgument

if TYPE_CHECKING:
    from jax.typing import DTypeLike

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
]


class Partitioner(ABC):
    """The base of partitioners: functions of the shape and the dtype of a variable."""

    @abstractmethod
    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Return the number of parts for each dimension, all of them 1 except for `axis`."""


@final
class FixedShardsPartitioner(Partitioner):
    """A partitioner with the same number of parts for every variable that has enough rows.

    Args:
      num_shards: The number of parts.

    >>> import replicax as rx
    >>> rx.experimental.partitioners.FixedShardsPartitioner(2)((10, 3), "float32")
    [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        return _parts(shape, axis, min(self._num_shards, shape[axis]))


@final
class MinSizePartitioner(Partitioner):
    """A partitioner that makes as many parts as possible, none of them smaller than a size.

    Args:
      min_shard_bytes: The smallest size of a part.
      max_shards: The largest number of parts.

    >>> import replicax as rx
    >>> by_size = rx.experimental.partitioners.MinSizePartitioner(4, max_shards=2)
    >>> by_size((6, 1), "float32"), by_size((1, 6), "float32")
    ([2, 1], [1, 1])
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1) -> None:
        self._min_shard_bytes = _positive("min_shard_bytes", min_shard_bytes)
        self._max_shards = _positive("max_shards", max_shards)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        size = math.prod(shape) * jnp.dtype(dtype).itemsize
        parts = min(shape[axis], self._max_shards, math.ceil(size / self._min_shard_bytes))
        return _parts(shape, axis, parts)


@final
class MaxSizePartitioner(Partitioner):
    """A partitioner that makes as few parts as possible, none of them larger than a size.

    Args:
      max_shard_bytes: The largest size of a part, if it has more than one row.
      max_shards: The largest number of parts; by default there is no limit.

    >>> import replicax as rx
    >>> by_size = rx.experimental.partitioners.MaxSizePartitioner(4)
    >>> by_size((6, 1), "float32"), by_size((6, 1), "int8")
    ([6, 1], [2, 1])
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None) -> None:
        self._max_shard_bytes = _positive("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _positive("max_shards", max_shards)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        rows = shape[axis]
        row_bytes = math.prod(shape) // max(rows, 1) * jnp.dtype(dtype).itemsize
        rows_in_a_part = max(1, self._max_shard_bytes // max(row_bytes, 1))
        parts = math.ceil(rows / rows_in_a_part)
        most = parts if self._max_shards is None else self._max_shards
        return _parts(shape, axis, min(parts, most))


def _parts(shape: Sequence[int], axis: int, count: int) -> list[int]:
    return [max(1, count) if index == axis else 1 for index in range(len(shape))]


def _positive(name: str, number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InvalidArgument(f"`{name}` must be a positive whole number; got {described(number)}.")
    return number
