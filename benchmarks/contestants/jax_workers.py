"""JAX by hand on several workers: `jax.distributed`, then the same as `jax_shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from _problem import Cell
from _workers import Worker, serve_workers
from jax_shard_map import training_of


def build(cell: Cell, worker: Worker) -> Callable[[], Any]:
    join(worker)
    return training_of(cell)  # its steps are dispatched, and awaited at the end of a turn


def join(worker: Worker) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(worker.addresses[0], len(worker.addresses), worker.index)


if __name__ == "__main__":
    serve_workers(build, {"jax": jax.__version__})
