"""The division of a batch: which rows go to which replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import jax
import numpy as np

from replicax import _nest
from replicax._enums import PartialBatches
from replicax.errors import ShapeMismatch
from replicax.topology import Topology

Bounds = tuple[int, int]  # the first row, and the one after the last


@final
@dataclass(frozen=True, slots=True)
class Workers:
    """The `count` workers that share the input, their `replicas`, and which of these are `local`.

    `partial_batches` says how they divide a batch that is not full.
    """

    replicas: int
    local: tuple[int, ...]
    count: int = 1
    index: int = 0
    partial_batches: PartialBatches = PartialBatches.EVEN

    @classmethod
    def of(
        cls, topology: Topology, partial_batches: PartialBatches = PartialBatches.EVEN
    ) -> Workers:
        processes = sorted({replica[0].process_index for replica in topology.devices})
        return cls(
            topology.num_replicas,
            topology.local_replicas,
            len(processes),
            processes.index(jax.process_index()),
            partial_batches,
        )

    def cut_shared(self, rows: int, full: int, done: int = 0, _: int = 0) -> list[list[Bounds]]:
        """Cut this worker's rows, in one step, from a batch that every worker reads.

        Args:
          rows: The number of rows.
          full: The number of rows of a full batch.
          done: How many rows have already been used; the rest are a partial batch.
        """
        left = rows - done
        bounds = _ranges(self._fitted(shares(full, self.replicas), left), done)
        return [[bounds[replica] for replica in self.local]]

    def cut_own(
        self, rows: int, full: int, done: int = 0, steps_done: int = 0
    ) -> list[list[Bounds]]:
        """Cut all rows of a batch that only this worker reads, in as many steps as it takes.

        In each step its replicas take as many rows as they would from a full shared batch; what is
        left for the last step is a partial batch. Where the shares differ, workers take turns with
        the larger ones, so that a step has `full` rows over all workers.
        """
        sizes = shares(full, self.replicas)
        steps: list[list[Bounds]] = []
        position = done
        while position < rows or not steps:
            number = steps_done + len(steps)
            # The turns shift after every round of the workers, or a replica might never get a row.
            turn = number * len(self.local) + number // self.count
            wanted = [sizes[(replica + turn) % self.replicas] for replica in self.local]
            steps.append(_ranges(self._fitted(wanted, rows - position), position))
            position = steps[-1][-1][1]
        return steps

    def _fitted(self, wanted: Sequence[int], rows: int) -> Sequence[int]:
        """Return the shares: as wanted if `rows` suffice, otherwise as `partial_batches` says."""
        if rows >= sum(wanted):
            return wanted
        if self.partial_batches is PartialBatches.EVEN:
            return shares(rows, len(wanted))
        stops = [min(stop, rows) for stop in accumulate(wanted, initial=0)]
        return [stop - start for start, stop in pairwise(stops)]


def _ranges(sizes: Sequence[int], first: int) -> list[Bounds]:
    """Return consecutive ranges of these sizes."""
    return list(pairwise(accumulate(sizes, initial=first)))


def shares(rows: int, replicas: int) -> list[int]:
    """Return how many rows each replica gets: the same number, or one more for the first few.

    >>> shares(10, 4)
    [3, 3, 2, 2]
    """
    least, more = divmod(rows, replicas)
    return [least + (replica < more) for replica in range(replicas)]


def common_rows(arrays: Sequence[np.ndarray]) -> int | None:
    """Return the size of the first dimension if all arrays agree on it, otherwise None."""
    sizes = {array.shape[:1] for array in arrays}
    return next(iter(sizes))[0] if len(sizes) == 1 and () not in sizes else None


def count_rows(arrays: Sequence[np.ndarray], structure: object) -> int:
    """Return the size of the first dimension, in which all arrays of a nest must agree."""
    rows = common_rows(arrays)
    if rows is not None:
        return rows
    named, _ = _nest.flatten_with_paths(jax.tree.unflatten(structure, arrays), everything=True)
    shapes = [f"{path or 'array'}: {leaf.shape}" for path, leaf in named]
    scalars = [path for path, leaf in named if not leaf.ndim]
    advice = "Give every array the same number of rows."
    if not arrays:
        problem = "A batch has no arrays"
    elif scalars:
        problem = f"A batch has an array without rows{_at(scalars)}"
        advice = (
            "Batch the examples first; of a number that is for the whole batch, make one for each "
            "row."
        )
    else:
        problem = "The arrays of a batch have different numbers of rows"
    raise ShapeMismatch(
        f"{problem}; got {', '.join(shapes) or structure}. The first dimension of each is divided "
        f"over the replicas. {advice}"
    )


def _at(paths: Sequence[str]) -> str:
    return f" at {', '.join(paths)}" if all(paths) else ""
