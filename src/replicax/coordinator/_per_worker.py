"""Datasets of which each worker has its own."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, final

from replicax.errors import ContextError


@final
class PerWorkerDataset:
    """A dataset that each worker makes for itself; `iter` of it goes into scheduled functions."""

    def __init__(
        self, dataset: Any, numbers: itertools.count[int], forget: Callable[[int], None]
    ) -> None:
        self._dataset, self._numbers, self._forget = dataset, numbers, forget

    def __iter__(self) -> PerWorkerValues:
        number = next(self._numbers)
        iterator = PerWorkerValues(self._dataset, number)
        weakref.finalize(iterator, self._forget, number).atexit = False
        return iterator


@final
class PerWorkerValues:
    """An iterator of each worker, over a dataset of its own.

    Give it to a scheduled function as an argument, and call `next` on it there.
    """

    def __init__(self, dataset: Any, number: int) -> None:
        self._dataset, self._number = dataset, number

    def __iter__(self) -> PerWorkerValues:
        return self

    def __next__(self) -> NoReturn:
        raise ContextError(
            "The iterator of a per-worker dataset gives its elements on workers. Give it to a "
            "scheduled function as an argument, `coordinator.schedule(step, args=(iterator,))`, "
            "and call `next` on that argument."
        )
