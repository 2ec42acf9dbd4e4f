"""The batches that the input contestants iterate over: the same for all, of distinct rows.

Only NumPy is imported here, because each contestant runs in an environment of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from _problem import CLASSES, FEATURES, Cell

BATCHES = 64  # 51 MB of rows, in batches of 256


def arrays_of(cell: Cell, batches: int = BATCHES) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of all batches, and their labels."""
    random = np.random.RandomState(1)
    count = batches * cell.global_batch
    rows = random.randn(count, FEATURES).astype(np.float32)
    return rows, random.randint(0, CLASSES, count).astype(np.int32)


def stacks_of(cell: Cell, count: int) -> Iterator[list[np.ndarray]]:
    """Yield rows and labels of the next `count` batches, along a new first axis, endlessly."""
    # The arrays are doubled, so that a stack is a view wherever it begins, and is never copied.
    batches = [
        np.concatenate([array, array]).reshape(-1, cell.global_batch, *array.shape[1:])
        for array in arrays_of(cell)
    ]
    first = 0
    while True:
        yield [array[first : first + count] for array in batches]
        first = (first + count) % BATCHES


def fingerprint(element: Any) -> float:
    """Return a number for an element: a pair of values over replicas, the rows and the labels.

    Other rows, another order of them or another division over the replicas would change it. Both
    libraries' values have their components in `values`.
    """
    shares = [[np.asarray(share, np.float64) for share in column.values] for column in element]
    total = 0.0
    for replica, (rows, labels) in enumerate(zip(*shares, strict=True), start=1):
        places = np.arange(1, len(rows) + 1)
        total += replica * float(places @ (rows.sum(axis=1) + labels))
    return total
