"""The parts of a training step of replicax on several workers, one at a time.

workers.py starts it with the name of a part, e.g. `replicax_parts.py compute`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import replicax_workers
from _problem import Cell, problem_of
from _replicax import VERSIONS, mirrored_strategy, training_of
from _workers import Worker, nothing_to_compare, serve_workers

import replicax as rx


def compute(cell: Cell, worker: Worker) -> Callable[[], Any]:
    """Make a step of each worker alone, at the same time: all of a step but the communication."""
    problem = problem_of(cell)
    train = rx.function(training_of(cell, mirrored_strategy(1)))
    rows, labels = (
        jax.device_put(shares[worker.index]) for shares in (problem.rows, problem.labels)
    )
    return lambda: jax.block_until_ready(train(rows, labels))


def all_reduce(cell: Cell, worker: Worker) -> Callable[[], Any]:
    """Make a step that only sums over the workers: the gradients and the loss."""
    strategy = replicax_workers.join(worker)
    gradients = _of_all(strategy, [*problem_of(cell).weights, *problem_of(cell).biases])
    loss = _of_all(strategy, problem_of(cell).biases[0][0])

    def sums(gradients: Any) -> Any:
        return rx.get_replica_context().all_reduce(rx.ReduceOp.SUM, gradients)

    @rx.function
    def step(gradients: Any, loss: Any) -> Any:
        summed = strategy.run(sums, args=(gradients,))
        return summed, strategy.reduce(rx.ReduceOp.SUM, loss, axis=None)

    return lambda: step(gradients, loss)


def call(cell: Cell, worker: Worker) -> Callable[[], Any]:
    """Make a compiled step that does nothing: the cost of a call, included in both of the above."""
    strategy = replicax_workers.join(worker)
    loss = _of_all(strategy, problem_of(cell).biases[0][0])
    step = rx.function(lambda loss: strategy.run(lambda value: value + 1, args=(loss,)))
    return lambda: step(loss)


def _of_all(strategy: rx.Strategy, arrays: Any) -> Any:
    return strategy.experimental_distribute_values_from_function(lambda _: arrays)


PARTS = {
    "step": replicax_workers.build,
    "compute": compute,
    "all-reduce": all_reduce,
    "call": call,
}

if __name__ == "__main__":
    serve_workers(PARTS[sys.argv[1]], VERSIONS, fetch=nothing_to_compare)
