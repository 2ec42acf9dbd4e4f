"""Grain: `MapDataset` and `IterDataset`. Tested with Grain 0.2.18."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from typing import Any, final

from replicax._typing import DatasetLike, Json, Nest
from replicax.errors import InvalidArgument
from replicax.input._ending import EndOfData, Guarded, meaning_of
from replicax.input._source import CannotShardByFile, Reader, Source, fields_of

# Grain's own default. With these threads it reads 500 elements ahead, which is meant for examples.
# Here elements are whole batches, and another buffer follows, so one per thread is enough.
_THREADS = 16
_ENDLESS = 2**40  # steps; at a thousand per second they take 35 years


def recognise(dataset: object) -> Source | None:
    grain = sys.modules.get("grain")
    if grain is None:
        return None
    if isinstance(dataset, grain.MapDataset):
        return _MapSource(dataset)
    if isinstance(dataset, grain.IterDataset):
        return _IterSource(dataset)
    return None


@final
class _MapSource(Source):
    """A source with random access, so that a worker can read only its own part."""

    def __init__(self, dataset: DatasetLike) -> None:
        self._dataset = dataset

    def start(self, state: Json = None) -> Reader:
        import grain

        if len(self._dataset) == 0 or _only_moves_memory(self._dataset):
            return _IndexReader(self._dataset, state)
        options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_THREADS)
        return _GrainReader(self._dataset.to_iter_dataset(options), state)

    @property
    def length(self) -> int | None:
        return None if self.infinite or is_sparse(self._dataset) else len(self._dataset)

    @property
    def infinite(self) -> bool:
        # `repeat()` has the length `sys.maxsize`, which `batch` and slices reduce.
        return len(self._dataset) > _ENDLESS

    @property
    def quick(self) -> bool:
        return len(self._dataset) == 0 or _only_moves_memory(self._dataset)

    def shard_by_file(self, count: int, index: int) -> Source:
        _require_files(self._dataset, count)
        return _MapSource(self._dataset[index::count])

    def batched(self, size: int) -> Source:
        if is_sparse(self._dataset):  # Grain can batch it only while iterating.
            return _IterSource(self._dataset.to_iter_dataset().batch(size))
        return _MapSource(self._dataset.batch(size))


@final
class _IterSource(Source):
    """A source that can only be read in order."""

    def __init__(self, dataset: DatasetLike) -> None:
        self._dataset = dataset

    def start(self, state: object = None) -> Reader:
        return _GrainReader(self._dataset, state)

    def shard_by_file(self, count: int, index: int) -> Source:
        _require_files(self._dataset, count)
        if any(len(_parents(node)) > 1 for node in _nodes(self._dataset)):
            raise CannotShardByFile(
                "it joins several datasets, whose files need not belong to each other"
            )
        try:
            shard = copy.deepcopy(self._dataset)  # `set_slice` changes it in place
        except TypeError as error:  # for example, a lock in a function that it maps
            raise CannotShardByFile(f"it cannot be copied ({error})") from error
        _keep(shard, slice(index, None, count))
        return _IterSource(shard)

    def batched(self, size: int) -> Source:
        return _IterSource(self._dataset.batch(size))


@final
class _GrainReader(Reader):
    def __init__(self, dataset: DatasetLike, state: Json) -> None:
        self._iterator = iter(dataset)
        _guard_parents(self._iterator)
        if state is not None:
            try:
                self._iterator.set_state(copy.deepcopy(state))
            except Exception as error:
                self._iterator.close()
                raise InvalidArgument(
                    f"Grain does not understand this state of its iterator: {state!r}. Give what "
                    "`get_state` of an iterator over the same dataset returned."
                ) from error

    def read(self) -> Nest:
        try:
            return next(self._iterator)
        except StopIteration as stop:
            raise meaning_of(stop) from stop

    def get_state(self) -> Json:
        return copy.deepcopy(self._iterator.get_state())  # some return the object that they change

    def close(self) -> None:
        self._iterator.close()


@final
class _IndexReader(Reader):
    """A reader for datasets that need no Grain threads, and for empty ones, which Grain refuses."""

    def __init__(self, dataset: DatasetLike, state: Json) -> None:
        self._dataset = dataset
        self._length = len(dataset)
        self._next_index: int = 0 if state is None else fields_of(state, "next_index")[0]

    def read(self) -> Nest:
        while self._next_index < self._length:
            element = self._dataset[self._next_index]
            self._next_index += 1
            if element is not None:  # Grain's marker for one that was filtered out
                return element
        raise EndOfData

    def get_state(self) -> Json:
        return {"next_index": self._next_index}


def _guard_parents(iterator: Any) -> None:
    """Guard the iterators that a Grain iterator reads from, if it does so in Grain's usual way.

    There is no public way to see the functions of a pipeline or the iterators of its steps.
    """
    parents = getattr(iterator, "_parents", ())
    for parent in parents:
        _guard_parents(parent)
    if parents:
        iterator._parents = tuple(Guarded(parent) for parent in parents)


def _only_moves_memory(dataset: object) -> bool:
    """Tell whether a dataset only reads arrays in memory, so that threads would be in the way."""
    import grain

    from replicax.input._arrays import ArrayDataset, Batches
    from replicax.input._pipeline import Cached, Pipeline

    # Grain has no public names for the last two.
    example = grain.MapDataset.range(2)
    kinds = (
        ArrayDataset,
        Batches,
        Cached,
        Pipeline,
        type(example.repeat(2)),
        type(example[:1]),
    )
    return all(isinstance(node, kinds) for node in _nodes(dataset))


def is_sparse(dataset: object) -> bool:
    """Tell whether some of its elements may be missing, which is known only once they are read."""
    import grain

    kinds = (
        type(grain.MapDataset.range(2).filter(bool)),
        grain.experimental.FlatMapMapDataset,
    )
    return any(isinstance(node, kinds) for node in _nodes(dataset))


def _require_files(dataset: object, count: int) -> None:
    files = [path for node in _nodes(dataset) for path in _paths(node)]
    if not files:
        raise CannotShardByFile("none of its sources names files")
    if len(files) < count:
        raise CannotShardByFile(f"it is read from {len(files)} file(s), fewer than the workers")


def _nodes(dataset: object) -> Iterator[Any]:
    yield dataset
    for parent in _parents(dataset):
        yield from _nodes(parent)


def _parents(dataset: DatasetLike) -> Sequence[object]:
    """Return the parents; none if a user's class skips `super().__init__`, which Grain allows."""
    try:
        return dataset.parents
    except AttributeError:
        return ()


def _paths(node: object) -> Sequence[object]:
    """Return the files that a source reads.

    `paths` is public on Grain's sources of records. `ParquetIterDataset` keeps its paths private,
    and there is no other way to get them.
    """
    paths = getattr(node, "paths", None) or getattr(node, "_paths", None) or ()
    return [paths] if isinstance(paths, (str, bytes)) or not isinstance(paths, Sequence) else paths


def _keep(dataset: DatasetLike, part: slice) -> None:
    """Make every source of a copied pipeline read only a part, as Grain does for its own workers.

    A source of files keeps part of the files; one with random access, part of its elements.
    """
    if hasattr(dataset, "set_slice"):  # Grain's protocol, for sources and no other steps
        dataset.set_slice(part)
    elif parents := _parents(dataset):
        for parent in parents:
            _keep(parent, part)
    else:
        raise InvalidArgument(
            f"{type(dataset).__name__} reads files and cannot read only some of them. "
            "Use `AutoShardPolicy.DATA`, or `distribute_datasets_from_function`."
        )
