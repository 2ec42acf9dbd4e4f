"""The same rows from every kind of source."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import numpy as np
import pytest

import replicax as rx

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def _optional(name: str) -> Any:
    """Import a library that may be missing; do so early, as importing it changes the process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            return None


TENSORFLOW, TORCH = _optional("tensorflow"), _optional("torch")


class Rows:
    """A Grain source that reads row by row."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]


def _batches(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _generator(rows: np.ndarray, size: int) -> Callable[[], Iterator[np.ndarray]]:
    def generate() -> Iterator[np.ndarray]:
        memory = np.empty((size, *rows.shape[1:]), rows.dtype)  # reused for every batch
        for batch in _batches(rows, size):
            memory[: len(batch)] = batch
            yield memory[: len(batch)]

    return generate


def _torch_loader(rows: np.ndarray, size: int, **options: Any) -> Any:
    return TORCH.utils.data.DataLoader(Rows(TORCH.from_numpy(rows)), batch_size=size, **options)


# This is what AUTO becomes for rows in memory, without its warning with several workers.
BY_ROWS = rx.InputOptions(auto_shard_policy="DATA")

Maker = Callable[[np.ndarray, int], Any]
SOURCES: dict[str, Maker] = {
    "arrays": lambda rows, size: rx.from_tensor_slices(rows).batch(size),
    "grain map": lambda rows, size: grain.MapDataset.source(Rows(rows)).batch(size),
    "grain iter": lambda rows, size: (
        grain.MapDataset.source(Rows(rows)).to_iter_dataset().batch(size)
    ),
    "list": _batches,
    "generator": _generator,
    "tf.data": lambda rows, size: TENSORFLOW.data.Dataset.from_tensor_slices(rows).batch(size),
    "torch": _torch_loader,
}
EXAMPLES: dict[str, Callable[[np.ndarray], Any]] = {
    "arrays": rx.from_tensor_slices,
    "grain map": lambda rows: grain.MapDataset.source(Rows(rows)),
    "grain iter": lambda rows: grain.MapDataset.source(Rows(rows)).to_iter_dataset(),
    "list": list,
    "generator": lambda rows: lambda: iter(rows),
    "tf.data": lambda rows: TENSORFLOW.data.Dataset.from_tensor_slices(rows),
    "torch": lambda rows: TORCH.utils.data.DataLoader(
        Rows(TORCH.from_numpy(rows)), batch_size=None
    ),
}


def require(name: str) -> None:
    if name == "tf.data" and TENSORFLOW is None:
        pytest.skip("TensorFlow is not installed: replicax[tensorflow], or `make test-all`")
    if name == "torch" and TORCH is None:
        pytest.skip("PyTorch is not installed: replicax[torch], or `make test-all`")


def shares_of(strategy: rx.Strategy, elements: Any) -> list[list[Any]]:
    """Return the replicas' parts of every element, as lists."""
    return [
        [np.asarray(part).tolist() for part in strategy.experimental_local_results(element)]
        for element in elements
    ]


RULES = ["even", "in_order"]


def expected_shares(
    rows: Sequence[Any], size: int, replicas: int, rule: str = "even"
) -> list[list[Any]]:
    """Divide by the rules of SPEC: a batch is divided evenly, or fills the shares of a full one."""
    steps = []
    for start in range(0, len(rows), size):
        batch = list(rows[start : start + size])
        divided = min(size, len(rows)) if rule == "in_order" else len(batch)
        shares = [divided // replicas + (r < divided % replicas) for r in range(replicas)]
        step = []
        for share in shares:
            step.append(batch[:share])
            batch = batch[share:]
        steps.append(step)
    return steps


def record_dataset(directory):
    """Write four files of four numbers each; return a dataset of them, in batches of four."""
    require("tf.data")
    paths = [f"{directory}/{number}.tfr" for number in range(1, 5)]
    for number, path in enumerate(paths):
        with TENSORFLOW.io.TFRecordWriter(path) as writer:
            for row in range(4):
                writer.write(str(4 * number + row).encode())
    dataset = TENSORFLOW.data.TFRecordDataset(paths)
    return dataset.map(TENSORFLOW.strings.to_number).batch(4)
