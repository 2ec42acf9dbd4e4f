"""The data ends at its end, and not where a function of the user raises StopIteration."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import pytest
from pipelines import TENSORFLOW, TORCH, Rows, require, shares_of

import replicax as rx
from replicax.input._ending import EndOfData, Guarded
from replicax.input._prefetch import Prefetcher

ROWS = np.arange(12, dtype=np.float32)
WHOLE = [[[row], [row + 1]] for row in range(0, 12, 2)]  # of two replicas, in batches of two


def parse(rows: Any) -> Any:
    """Raise what `next` without a default raises, at the third batch."""
    if 5 in np.asarray(rows):
        next(iter(()))
    return rows


def accept(row: Any) -> bool:
    return parse(row) is row


class Parse(grain.transforms.Map):
    def map(self, element: Any) -> Any:
        return parse(element)


class ParsedRows(Rows):
    """A source that fails while it reads."""

    def __getitem__(self, index: int) -> Any:
        return parse(super().__getitem__(index))


class Mapped:
    """A dataset that Python's own `map` makes."""

    def __iter__(self) -> Iterator[Any]:
        return map(parse, ROWS.reshape(6, 2))


def source() -> grain.MapDataset:
    return grain.MapDataset.source(Rows(ROWS))


def batched(examples: Any) -> Any:
    return examples.batch(2)


def torch_loader(dataset: Any, **options: Any) -> Any:
    require("torch")
    return TORCH.utils.data.DataLoader(dataset, batch_size=2, **options)


def tf_dataset(function: str, **options: Any) -> Any:
    require("tf.data")

    def parsed(row: Any) -> Any:
        row = getattr(TENSORFLOW, function)(parse, [row], TENSORFLOW.float32)
        return TENSORFLOW.ensure_shape(row, ())

    return TENSORFLOW.data.Dataset.from_tensor_slices(ROWS).map(parsed, **options).batch(2)


BROKEN = {
    "arrays, map": lambda: rx.from_tensor_slices(ROWS).map(parse).batch(2),
    "arrays, map of batches": lambda: rx.from_tensor_slices(ROWS).batch(2).map(parse),
    "arrays, cache": lambda: rx.from_tensor_slices(ROWS).map(parse).cache().batch(2),
    "grain map": lambda: batched(source().map(parse)),
    "grain map of batches": lambda: batched(source()).map(parse),
    "grain map of a class": lambda: batched(source().map(Parse())),
    "grain filter": lambda: batched(source().filter(accept).to_iter_dataset()),
    "grain source": lambda: batched(grain.MapDataset.source(ParsedRows(ROWS))),
    "grain batch_fn": lambda: source().batch(2, batch_fn=lambda rows: parse(np.stack(rows))),
    "grain iter, map": lambda: batched(source().to_iter_dataset().map(parse)),
    "grain iter, map of batches": lambda: batched(source().to_iter_dataset()).map(parse),
    "grain iter, filter": lambda: batched(source().to_iter_dataset().filter(accept)),
    "grain iter, map before": lambda: batched(source().map(parse).to_iter_dataset()),
    "grain iter, thread": lambda: batched(
        grain.experimental.ThreadPrefetchIterDataset(
            source().to_iter_dataset().map(parse), prefetch_buffer_size=2
        )
    ),
    "re-iterable": Mapped,
    "function": lambda: lambda: map(parse, ROWS.reshape(6, 2)),
    "generator function": lambda: lambda: (parse(rows) for rows in ROWS.reshape(6, 2)),
    "torch dataset": lambda: torch_loader(ParsedRows(ROWS)),
    "torch collate_fn": lambda: torch_loader(
        Rows(ROWS), collate_fn=lambda rows: parse(np.stack(rows))
    ),
    "tf.data py_function": lambda: tf_dataset("py_function"),
    "tf.data numpy_function": lambda: tf_dataset("numpy_function", num_parallel_calls=2),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_stop_iteration_of_the_users_function_is_an_error(two, kind):
    iterator = iter(two.experimental_distribute_dataset(BROKEN[kind]()))
    assert shares_of(two, [next(iterator), next(iterator)]) == WHOLE[:2]
    for _ in range(2):  # and none of them ends a loop
        with pytest.raises(Exception, match="StopIteration") as caught:
            next(iterator)
        assert not isinstance(caught.value, StopIteration)
        if not kind.startswith(("tf.data", "generator")):
            assert isinstance(caught.value, rx.errors.InputFailed)
            assert isinstance(caught.value, RuntimeError)  # as Python's own, for generators
            assert "test_ending.py:" in str(caught.value)


def test_a_stop_iteration_in_a_process_of_torch_is_an_error(torch):
    try:
        parse(ROWS)
    except StopIteration:
        wrapped = torch._utils.ExceptionWrapper(where="in DataLoader worker process 0")
    raising = Guarded(map(type(wrapped).reraise, [wrapped]))
    with pytest.raises(rx.errors.InputFailed, match=r"Caught .* in DataLoader worker process 0"):
        next(raising)


def test_a_stop_iteration_among_rows_that_are_passed_over_is_an_error(two):
    whole = iter(two.experimental_distribute_dataset(lambda: iter(ROWS.reshape(6, 2))))
    for _ in range(5):
        next(whole)
    state = whole.get_state()
    whole.close()
    iterator = iter(two.experimental_distribute_dataset(Mapped()))
    iterator.set_state(state)
    with pytest.raises(rx.errors.InputFailed, match="`parse`"):
        next(iterator)


class Own:
    """An iterator of the user's, which ends in a method of its own."""

    def __init__(self) -> None:
        self._rows = iter(ROWS.reshape(6, 2))

    def __iter__(self) -> Own:
        return self

    def __next__(self) -> Any:
        return self._advance()

    def _advance(self) -> Any:
        return _next_of(self._rows)


def _next_of(rows: Iterator[Any]) -> Any:
    for row in rows:
        return row
    raise StopIteration


def decorated(method: Any) -> Any:
    def wrapper(*args: Any) -> Any:
        return method(*args)

    return wrapper


class Decorated(Own):
    @decorated
    def __next__(self) -> Any:
        return super().__next__()


class OwnOfGrain(grain.DatasetIterator):
    def __init__(self) -> None:
        super().__init__()
        self._own = Own()

    def __next__(self) -> Any:
        return next(self._own)

    def get_state(self) -> Any:
        return {}

    def set_state(self, state: Any) -> None:
        raise NotImplementedError


class DatasetOfGrain(grain.IterDataset):
    def __iter__(self) -> OwnOfGrain:
        return OwnOfGrain()


WHOLE_ONES = {
    "own": lambda: lambda: Own(),
    "decorated": lambda: lambda: Decorated(),
    "in map": lambda: lambda: map(np.copy, Own()),
    "in zip": lambda: lambda: (pair[0] for pair in zip(Decorated(), Own(), strict=True)),
    "grain": DatasetOfGrain,
    "grain, mapped": lambda: DatasetOfGrain().map(np.copy).batch(1).map(lambda rows: rows[0]),
}


@pytest.mark.parametrize("kind", WHOLE_ONES)
def test_the_end_of_an_iterator_of_the_users_is_the_end(two, kind):
    dataset = two.experimental_distribute_dataset(WHOLE_ONES[kind]())
    assert shares_of(two, dataset) == WHOLE


@pytest.mark.parametrize(("raised", "seen"), [(EndOfData, StopIteration), (StopIteration, None)])
def test_only_the_end_of_the_data_ends_the_thread_quietly(raised, seen):
    class Producer:
        def step(self) -> Any:
            raise raised

        def close(self) -> None:
            return

    ahead = Prefetcher(Producer, lambda step: step, depth=1, closed=threading.Event())
    with pytest.raises(seen or rx.errors.InputFailed) as caught:
        ahead.take()
    if seen is None:
        assert "in step" in str(caught.value)


def test_a_state_inside_of_a_batch_that_is_not_there_is_refused(two):
    """A state from a longer dataset is refused."""
    state = {
        "source": {"next_index": 3},
        "full_rows": 4,
        "rows_of_batch": 2,
        "steps_of_batch": 1,
    }
    iterator = iter(
        two.experimental_distribute_dataset(rx.from_tensor_slices(np.arange(8)).batch(4))
    )
    with pytest.raises(rx.errors.InvalidArgument, match="has ended before"):
        iterator.set_state({"steps": 7, "feed": state})
