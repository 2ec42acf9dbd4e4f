"""Host memory that CPU devices can use without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.dtypes import canonicalize_dtype

from replicax.values import is_numeric

_ALIGNMENT = 64  # what XLA requires on CPUs, in bytes


class _Private(bytearray):
    """Memory that only replicax writes."""


def aligned(shape: tuple[int, ...], dtype: object) -> np.ndarray:
    """Make an uninitialized array whose memory JAX uses on CPUs without a copy."""
    return _array_in(np.empty(_size(shape, dtype), np.uint8), shape, dtype)


def private_copy(array: np.ndarray) -> np.ndarray:
    """Return a read-only copy, which need not be copied again for a device."""
    if array.dtype.hasobject:
        return _read_only(array.copy())
    copy = _array_in(_Private(_size(array.shape, array.dtype)), array.shape, array.dtype)
    copy[...] = array
    return _read_only(copy)


def private_rows(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return some rows of an array, as a copy like that of `private_copy`."""
    if array.dtype.hasobject:
        return _read_only(array[rows])
    shape = (len(rows), *array.shape[1:])
    taken = _array_in(_Private(_size(shape, array.dtype)), shape, array.dtype)
    return _read_only(np.take(array, rows, axis=0, out=taken, mode="clip"))  # "raise" copies twice


def is_private(array: np.ndarray) -> bool:
    """Tell whether an array is a `private_copy`, or a part of one."""
    base = array.base.base if isinstance(array.base, np.ndarray) else array.base
    return isinstance(base, _Private) and not array.flags.writeable


def own_copy(array: np.ndarray) -> np.ndarray:
    """Return the array in memory that only replicax writes, in the dtype that JAX gives it.

    On CPUs, JAX 0.10.2 uses NumPy's own memory if it is aligned, even with `may_alias=False`, so
    the user's later writes would show in the element. JAX copies unaligned memory in its own
    threads, which takes twice as long as this copy.
    """
    if not is_numeric(array.dtype):
        return array.copy()
    dtype = canonicalize_dtype(array.dtype)
    if dtype == array.dtype and is_private(array):
        return array
    copy = aligned(array.shape, dtype)
    copy[...] = array
    return copy


def _size(shape: tuple[int, ...], dtype: Any) -> int:
    return int(np.prod(shape)) * np.dtype(dtype).itemsize + _ALIGNMENT


def _array_in(memory: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    address = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return np.ndarray(shape, dtype, memory, -address % _ALIGNMENT)


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
