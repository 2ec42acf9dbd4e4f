"""The pipelines that `rx.from_tensor_slices` returns. Importing this imports Grain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import grain
import numpy as np

from replicax import _nest
from replicax._typing import Leaf, Nest
from replicax.errors import InvalidArgument, InvalidType
from replicax.input.sources import is_sparse


@final
class Pipeline(grain.MapDataset):
    """A Grain dataset with the methods of `tf.data.Dataset` that Grain lacks.

    Every method returns another pipeline, so they can be called in any order. To Grain it is a
    dataset like any other; the steps themselves are Grain's.
    """

    def __init__(self, dataset: grain.MapDataset) -> None:
        super().__init__(dataset)
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.slice(index) if isinstance(index, slice) else self._dataset[index]

    def take(self, count: int) -> Pipeline:
        """Return the first `count` elements; all of them for -1."""
        self._require_dense("take")
        _require_integer("count", count, least=-1)
        return self if count == -1 else self[:count]

    def skip(self, count: int) -> Pipeline:
        """Return all but the first `count` elements; none for -1."""
        self._require_dense("skip")
        _require_integer("count", count, least=-1)
        return self[:0] if count == -1 else self[count:]

    def shard(self, num_shards: int, index: int) -> Pipeline:
        """Return every `num_shards`-th element, from `index` on."""
        self._require_dense("shard")
        _require_integer("num_shards", num_shards, least=1)
        _require_integer("index", index, least=0)
        if index >= num_shards:
            raise InvalidArgument(
                f"There is no shard {index} of {num_shards}: they are counted from 0. Give an "
                f"`index` from 0 to {num_shards - 1}."
            )
        return self[index::num_shards]

    def enumerate(self, start: int = 0) -> Pipeline:
        """Return pairs of a number, counting from `start`, and an element."""
        self._require_dense("enumerate")
        _require_integer("start", start)
        length = len(self)  # Grain keeps counting in later epochs
        return self.map_with_index(
            lambda index, element: (np.int64(start + index % length), element)
        )

    def zip(self, *others: grain.MapDataset) -> Pipeline:
        """Return tuples of elements of this dataset and others, until the shortest ends."""
        for other in others:
            if not isinstance(other, grain.MapDataset):
                raise InvalidType(
                    "`zip` joins datasets with random access; got a "
                    f"{type(other).__name__}. Give what `rx.from_tensor_slices` returns, or "
                    "another `grain.MapDataset`."
                )
        datasets = [_plain(each) for each in (self, *others)]
        for dataset in datasets:
            _require_dense("zip", dataset)
        shortest = min(len(dataset) for dataset in datasets)
        return Pipeline(
            grain.experimental.ZipMapDataset(
                [each if len(each) == shortest else each[:shortest] for each in datasets]
            )
        )

    def cache(self, filename: str = "") -> Pipeline:
        """Keep every element in memory once it has been made; later epochs get the same ones.

        Args:
          filename: Must be empty: elements are not kept in files.
        """
        if filename:
            raise InvalidArgument(
                f"`cache` keeps elements in memory; got the file name {filename!r}. Leave it out, "
                "or write the elements to a file and read that (`np.memmap`, Grain's sources)."
            )
        return Pipeline(Cached(self._dataset))

    def prefetch(self, buffer_size: int | None = None) -> Pipeline:
        """Return the dataset itself: distributed datasets are prefetched anyway.

        `rx.InputOptions(experimental_per_replica_buffer_size=...)` sets how far ahead.
        """
        return self

    def shuffle(  # pyright: ignore[reportIncompatibleMethodOverride] - so as not to mix them up
        self,
        buffer_size: int | None = None,
        seed: int | None = None,
        reshuffle_each_iteration: bool | None = None,
    ) -> Pipeline:
        """Return the elements in another order, determined by the seed and the epoch.

        Args:
          buffer_size: Refused, because it may be meant as Grain's seed.
          seed: Keyword-only; may be omitted after `.seed(...)`.
          reshuffle_each_iteration: Refused: every pass has the same order.
        """
        if buffer_size is not None or reshuffle_each_iteration is not None:
            given = {
                "buffer_size": buffer_size,
                "reshuffle_each_iteration": reshuffle_each_iteration,
            }
            said = ", ".join(
                f"{name}={value!r}" for name, value in given.items() if value is not None
            )
            raise InvalidArgument(
                f"`shuffle` has no buffer, as it shuffles all elements, and its order is that of "
                f"its seed in every pass; got {said} (a number without a name may be a size of "
                "`tf.data` or a seed of Grain). Write `shuffle(seed=...)`, and `repeat(epochs)` "
                "behind it for another order in every epoch."
            )
        return Pipeline(self._dataset.shuffle(seed=seed))

    # The rest are Grain's own methods.

    def apply(self, transformations: Any) -> Pipeline:
        return Pipeline(self._dataset.apply(transformations))

    def batch(
        self,
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: Callable[[Sequence[Nest]], object] | None = None,
    ) -> Pipeline:
        return Pipeline(
            self._dataset.batch(batch_size, drop_remainder=drop_remainder, batch_fn=batch_fn)
        )

    def filter(self, transform: Any) -> Pipeline:
        return Pipeline(self._dataset.filter(transform))

    def map(self, transform: Any) -> Pipeline:
        return Pipeline(self._dataset.map(transform))

    def map_with_index(self, transform: Any) -> Pipeline:
        return Pipeline(self._dataset.map_with_index(transform))

    def random_map(self, transform: Any, *, seed: int | None = None) -> Pipeline:
        return Pipeline(self._dataset.random_map(transform, seed=seed))

    def repeat(self, num_epochs: int | None = None, *, reseed_each_epoch: bool = True) -> Pipeline:
        return Pipeline(self._dataset.repeat(num_epochs, reseed_each_epoch=reseed_each_epoch))

    def seed(self, seed: int) -> Pipeline:
        return Pipeline(self._dataset.seed(seed))

    def slice(self, sl: slice) -> Pipeline:
        return Pipeline(self._dataset.slice(sl))

    def to_iter_dataset(
        self, read_options: grain.ReadOptions | None = None, *, allow_nones: bool = False
    ) -> grain.IterDataset:
        return self._dataset.to_iter_dataset(read_options, allow_nones=allow_nones)

    def __str__(self) -> str:
        return str(self._dataset)

    def _require_dense(self, method: str) -> None:
        _require_dense(method, self._dataset)


@final
class Cached(grain.MapDataset):
    """Elements of a dataset, each made once."""

    def __init__(self, parent: grain.MapDataset) -> None:
        super().__init__(parent)
        self._elements: dict[int, Nest] = {}

    def __len__(self) -> int:
        return len(self.parents[0])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        index %= len(self)
        if index not in self._elements:
            self._elements[index] = self.parents[0][index]
        return _nest.transform(_read_only, self._elements[index], everything=True)

    def __str__(self) -> str:
        return "Cached"


def _read_only(leaf: object) -> Leaf:
    """Return a leaf that its reader cannot change for the next one."""
    if isinstance(leaf, np.ndarray):
        leaf = leaf.view()
        leaf.flags.writeable = False
    return leaf


def _plain(dataset: grain.MapDataset) -> grain.MapDataset:
    """Return a dataset as Grain made it."""
    return dataset.parents[0] if isinstance(dataset, Pipeline) else dataset


def _require_dense(method: str, dataset: grain.MapDataset) -> None:
    if is_sparse(dataset):
        raise InvalidArgument(
            f"`{method}` goes by the elements' numbers, and some of this dataset's are left out "
            f"by a `filter` ({dataset}), which shows only when they are read. Put `{method}` "
            "before the `filter`, or leave rows out of the arrays: "
            "`rx.from_tensor_slices(arrays[wanted])`."
        )


def _require_integer(name: str, value: object, least: int | None = None) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise InvalidType(f"`{name}` must be a whole number; got {value!r}.")
    if least is not None and value < least:
        raise InvalidArgument(f"`{name}` must be at least {least}; got {value}.")
