"""The global random generators from which Keras and users draw the order of examples."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


def generators() -> list[Any]:
    """Return the states of NumPy's and Python's generators, in a form that JSON can express."""
    state: Any = np.random.get_state(legacy=True)
    kind, keys, *rest = state
    return [[kind, keys.tolist(), *rest], random.getstate()]


def set_generators(state: list[Any]) -> None:
    (kind, keys, *rest), (version, words, gauss) = state
    numpy_state: object = (kind, np.asarray(keys, np.uint32), *rest)
    np.random.set_state(numpy_state)
    random.setstate((version, tuple(words), gauss))
