"""Grain datasets of arrays in memory. Importing this imports Grain."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import grain
import jax
import numpy as np

from replicax import _nest
from replicax._containers import is_container, opened
from replicax._typing import Nest
from replicax.input._memory import is_private, private_copy, private_rows
from replicax.input._row_splitting import count_rows


@final
class ArrayDataset(grain.MapDataset):
    """The rows of a nest of arrays, with which a pipeline of `rx.from_tensor_slices` begins.

    Grain stacks a batch row by row in Python, at some 5 us per row. Batches of arrays are slices,
    so `batch` slices instead if it directly follows the arrays, or a `shuffle` or slice of them.
    """

    def __init__(self, arrays: Nest, seed: int | None = None) -> None:
        super().__init__()
        nest = opened(arrays, data_only=False, is_leaf=_is_row_of_numbers)
        leaves, structure = jax.tree.flatten(nest, is_leaf=_is_row_of_numbers)
        leaves = [_kept(np.asanyarray(leaf)) for leaf in leaves]
        self._arrays = jax.tree.unflatten(structure, leaves)
        self._length = count_rows(leaves, structure)
        self._seed = seed
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, row = divmod(index, self._length)
        if self._seed is not None:
            row = self._order(epoch)[row]
        return _nest.transform(lambda array: array[row], self._arrays)

    def slice(self, sl: slice) -> grain.MapDataset:
        if self._seed is not None:
            return super().slice(sl)
        return ArrayDataset(_nest.transform(lambda array: array[sl], self._arrays))

    def shuffle(self, seed: int | None = None) -> grain.MapDataset:
        """Return the rows in a different order every epoch, determined by the seed."""
        if seed is None or self._seed is not None or not self._length:
            return super().shuffle(seed=seed)
        return ArrayDataset(self._arrays, seed)

    def batch(
        self,
        batch_size: int,
        *,
        drop_remainder: bool = False,
        batch_fn: Callable[[Sequence[Nest]], object] | None = None,
    ) -> grain.MapDataset:
        if batch_fn is not None or batch_size < 1:
            return super().batch(batch_size, drop_remainder=drop_remainder, batch_fn=batch_fn)
        return Batches(self, batch_size, drop_remainder)

    def rows(self, epoch: int, start: int, stop: int) -> Nest:
        """Return consecutive rows of an epoch."""
        if self._seed is None:
            return _nest.transform(lambda array: array[start:stop], self._arrays)
        order = self._order(epoch)[start:stop]
        return _nest.transform(lambda array: private_rows(array, order), self._arrays)

    def _order(self, epoch: int) -> np.ndarray:
        """Return the order of an epoch; the last two are kept, for readers at an epoch's end."""
        order = self._orders.get(epoch)
        if order is None:
            assert self._seed is not None
            seed = [self._seed, epoch % 2**32]
            order = np.random.default_rng(seed).permutation(self._length)
            self._orders = {**dict(list(self._orders.items())[-1:]), epoch: order}
        return order

    def __str__(self) -> str:
        return f"ArrayDataset({self._length} rows)"


@final
class Batches(grain.MapDataset):
    """Slices of arrays."""

    def __init__(self, parent: ArrayDataset, size: int, drop_remainder: bool) -> None:
        super().__init__(parent)
        self._rows = parent
        self._size = size
        rounded = math.floor if drop_remainder else math.ceil
        self._length = rounded(len(parent) / size)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, batch = divmod(index, self._length)
        start = batch * self._size
        return self._rows.rows(epoch, start, min(start + self._size, len(self._rows)))

    def __str__(self) -> str:
        return f"Batches({self._rows}, {self._size})"


def _kept(array: np.ndarray) -> np.ndarray:
    """Return a copy, safe from the user's later writes; a memory-mapped file is not copied."""
    if isinstance(array, np.memmap):
        view = array.view()
        view.flags.writeable = False
        return view
    return array if is_private(array) else private_copy(array)


def _is_row_of_numbers(node: object) -> bool:
    """Tell whether a node is a list of numbers, which is an array, as in TensorFlow, not a nest."""
    return isinstance(node, list) and all(
        np.ndim(leaf) == 0
        and not isinstance(leaf, np.ndarray)
        and not is_container(leaf, data_only=False, is_leaf=lambda _: False)
        for leaf in jax.tree.leaves(node)
    )
