"""Whole numbers in read-only arrays."""

from __future__ import annotations

import numpy as np

from replicax.errors import InvalidArgument, InvalidType


def integers(name: str, value: object, shape: tuple[int | None, ...], advice: str) -> np.ndarray:
    """Return `value` as a read-only array of `shape`, in which None stands for any size.

    Args:
      name: The name of the argument in messages.
      value: An array, or nested sequences.
      shape: The required shape.
      advice: What to give instead, as a sentence.
    """
    try:
        array = np.array(value)
    except ValueError:  # sequences of different lengths
        raise InvalidArgument(
            f"`{name}` must be an array of whole numbers; got {value!r}. {advice}"
        ) from None
    if array.size and array.dtype.kind not in "iu":
        raise InvalidType(f"`{name}` must be an array of whole numbers; got {value!r}. {advice}")
    fits = array.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, array.shape, strict=True)
    )
    if not fits or not array.size:
        sizes = ", ".join("n" if size is None else str(size) for size in shape)
        raise InvalidArgument(
            f"`{name}` must be an array of shape [{sizes}]; got one of shape "
            f"{list(array.shape)}. {advice}"
        )
    array = array.astype(np.int32)
    array.flags.writeable = False
    return array
