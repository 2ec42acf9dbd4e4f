"""Iterables that can be iterated over repeatedly, and functions that return iterators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import final

import jax
import numpy as np

from replicax._typing import DatasetLike
from replicax.errors import InvalidType
from replicax.input._source import CountingReader, Reader, Source, fields_of, numpy_of


def recognise(dataset: object) -> Source | None:
    if isinstance(dataset, (np.ndarray, jax.Array, Mapping)) or _is_tuple_of_arrays(dataset):
        raise InvalidType(
            f"A dataset has batches for elements; got {_kind(dataset)}. Say how many rows a batch "
            "has: `rx.from_tensor_slices(arrays).batch(global_batch_size)`. If these are batches, "
            "give a list of them."
        )
    if isinstance(dataset, Iterator):
        raise InvalidType(
            f"{type(dataset).__name__} can be iterated over only once, and a dataset is iterated "
            "over once an epoch. Give the function that makes it, uncalled, or a list."
        )
    if isinstance(dataset, Iterable) and not isinstance(dataset, (str, bytes)):
        return _IterableSource(dataset.__iter__, dataset)
    if callable(dataset) and not isinstance(dataset, type):
        return _IterableSource(dataset, dataset)
    return None


def _is_tuple_of_arrays(dataset: object) -> bool:
    """Tell whether it is a tuple of arrays: features and labels, most likely, not batches."""
    return (
        isinstance(dataset, tuple)
        and bool(dataset)
        and all(isinstance(element, (np.ndarray, jax.Array)) for element in dataset)
    )


def _kind(dataset: DatasetLike) -> str:
    if isinstance(dataset, tuple):
        return f"a tuple of arrays of shapes {', '.join(str(array.shape) for array in dataset)}"
    if isinstance(dataset, Mapping):
        return f"a {type(dataset).__name__} with the keys {list(dataset)}"
    return f"an array of shape {dataset.shape}"


@final
class _IterableSource(Source):
    def __init__(self, begin: Callable[[], object], dataset: DatasetLike) -> None:
        self._begin = begin
        self._dataset = dataset

    def start(self, state: object = None) -> Reader:
        elements = self._begin()
        if not isinstance(elements, Iterable):
            raise InvalidType(
                "A function that stands for a dataset must return an iterator, a new one for each "
                f"pass; {self._dataset!r} returned a {type(elements).__name__}. Make it a "
                "generator function, with `yield`. (A function that returns one element per call "
                "is for `make_input_fn_iterator` of `rx.compat.v1`.)"
            )
        done = 0 if state is None else fields_of(state, "read", "origin")[0]
        return CountingReader(iter(elements), numpy_of, done=done)

    @property
    def length(self) -> int | None:
        return len(self._dataset) if isinstance(self._dataset, Sized) else None
