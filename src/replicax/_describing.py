"""Descriptions of values for messages."""

from __future__ import annotations

import reprlib
from typing import final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

_FIRST = 3  # how many numbers of an array a message shows
_MANY_BITS = 10_000  # Python refuses to print integers of more than 4,300 digits


def described(value: object) -> str:
    """Describe a value in words: an array by its shape, dtype and first numbers, never in full."""
    return _words.repr(value)


@final
class _Words(reprlib.Repr):
    """Python's own way to shorten long values, with a description for arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200

    def repr1(self, x: object, level: int) -> str:
        if isinstance(x, (jax.Array, np.ndarray)):
            return _array(x)
        return super().repr1(x, level)

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > _MANY_BITS:
            return f"an int of {x.bit_length()} bits"
        return super().repr_int(x, level)


_words = _Words()


def _array(array: jax.Array | np.ndarray) -> str:
    words = f"array of shape {array.shape} and dtype {array.dtype}"
    numeric = jnp.issubdtype(array.dtype, jnp.number) or array.dtype == np.bool_
    here = isinstance(array, np.ndarray) or not isinstance(array, Tracer)
    if not here or not numeric or not array.size:
        return words
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return words
    first = np.asarray(array).ravel()[:_FIRST].tolist()
    more = ", ..." if array.size > _FIRST else ""
    return f"{words}: {', '.join(map(str, first))}{more}"
