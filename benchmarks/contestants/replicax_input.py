"""replicax: iteration over a distributed dataset, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from _batches import fingerprint
from _problem import Cell
from _protocol import serve
from _replicax import VERSIONS, distributed_arrays, mirrored_strategy


def build(cell: Cell) -> Callable[[], Any]:
    iterator = iter(distributed_arrays(cell, mirrored_strategy(cell.replicas)))
    # It waits for the arrays of each replica, because TensorFlow returns only finished arrays.
    return lambda: jax.block_until_ready(next(iterator))


if __name__ == "__main__":
    serve(build, VERSIONS, result_of=fingerprint)
