"""Which rows of a batch go to which replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, final

import jax
import numpy as np

from replicax import _nest
from replicax.errors import ShapeMismatch
from replicax.topology import Topology

Bounds = tuple[int, int]  # from this row, up to before that one


@final
@dataclass(frozen=True, slots=True)
class Workers:
    """Who shares the input: `replicas` over `count` workers, of which this one has `local`."""

    replicas: int
    local: tuple[int, ...]
    count: int = 1
    index: int = 0

    @classmethod
    def of(cls, topology: Topology) -> Workers:
        processes = sorted({replica[0].process_index for replica in topology.devices})
        return cls(
            topology.num_replicas,
            topology.local_replicas,
            len(processes),
            processes.index(jax.process_index()),
        )

    def cut_shared(self, rows: int, full: int, done: int = 0, _: int = 0) -> list[list[Bounds]]:
        """Of a batch that every worker reads: the rows of this one's replicas, in one step.

        Args:
          rows: How many there are.
          full: How many a full batch has. A partial one fills the replicas' shares in order.
          done: How many are not wanted any more; what is left is a partial batch.
        """
        stops = list(accumulate(shares(full, self.replicas), initial=done))
        bounds = list(pairwise(stops))
        return [[_clip(bounds[replica], rows) for replica in self.local]]

    def cut_own(
        self, rows: int, full: int, done: int = 0, steps_done: int = 0
    ) -> list[list[Bounds]]:
        """Of a batch that only this worker reads: all rows, in as many steps as it takes.

        In each step its replicas take as much as they would of a shared batch. Where that does not
        divide, workers take turns with the larger shares, so that a step of all of them has `full`
        rows.
        """
        sizes = shares(full, self.replicas)
        steps: list[list[Bounds]] = []
        position = done
        while position < rows or not steps:
            number = steps_done + len(steps)
            # After a round of all workers the turns shift, or a replica could stay without a row
            # for ever.
            turn = number * len(self.local) + number // self.count
            step = []
            for replica in self.local:
                stop = position + sizes[(replica + turn) % self.replicas]
                step.append(_clip((position, stop), rows))
                position = stop
            steps.append(step)
        return steps


def shares(rows: int, replicas: int) -> list[int]:
    """How many rows each replica gets: the same, or one more for the first ones.

    >>> shares(10, 4)
    [3, 3, 2, 2]
    """
    least, more = divmod(rows, replicas)
    return [least + (replica < more) for replica in range(replicas)]


def count_rows(arrays: Sequence[np.ndarray], structure: Any) -> int:
    """The size of the first dimension, in which all arrays of a nest have to agree."""
    sizes = {array.shape[:1] for array in arrays}
    if len(sizes) == 1 and () not in sizes:
        return next(iter(sizes))[0]
    named, _ = _nest.flatten_with_paths(jax.tree.unflatten(structure, arrays), everything=True)
    shapes = [f"{path or 'array'}: {leaf.shape}" for path, leaf in named]
    if not arrays:
        problem = "A batch has no arrays"
    elif () in sizes:
        problem = "A batch has an array without rows"
    else:
        problem = "The arrays of a batch have different numbers of rows"
    raise ShapeMismatch(
        f"{problem}; got {', '.join(shapes) or structure}. The first dimension of each is divided "
        "over the replicas: batch the examples first, and give every array the same number of rows."
    )


def _clip(bounds: Bounds, rows: int) -> Bounds:
    start, stop = bounds
    return min(start, rows), min(stop, rows)
