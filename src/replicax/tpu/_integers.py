"""Whole numbers in arrays that nobody can change."""

from __future__ import annotations

from typing import Any

import numpy as np

from replicax.errors import InvalidArgument, InvalidType


def integers(name: str, value: Any, shape: tuple[int | None, ...], advice: str) -> np.ndarray:
    """`value` as a read-only array of `shape`, in which None is any size.

    Args:
      name: What it is called in messages.
      value: An array, or nested sequences.
      shape: What its shape has to be.
      advice: What to give instead, as a sentence.
    """
    try:
        array = np.array(value)
    except ValueError:  # sequences of different lengths
        raise InvalidArgument(
            f"`{name}` has to be an array of whole numbers; got {value!r}. {advice}"
        ) from None
    if array.size and array.dtype.kind not in "iu":
        raise InvalidType(f"`{name}` has to be an array of whole numbers; got {value!r}. {advice}")
    fits = array.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, array.shape, strict=True)
    )
    if not fits or not array.size:
        sizes = ", ".join("n" if size is None else str(size) for size in shape)
        raise InvalidArgument(
            f"`{name}` has to be an array of shape [{sizes}]; got one of shape "
            f"{list(array.shape)}. {advice}"
        )
    array = array.astype(np.int32)
    array.flags.writeable = False
    return array
