"""Two workers train, and one of them ends in its third step, or before: as the first argument says.

The second argument is the worker that does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import jax
import numpy as np

import replicax as rx
from replicax.checkpoint._restoring import on_all_workers


def end(how: str) -> None:
    if how in ("exit", "caught"):
        sys.exit(3)
    raise ArithmeticError("a fault of the program")


def train(strategy: rx.Strategy, how: str, culprit: int) -> None:
    is_culprit = strategy.cluster_resolver.task_id == culprit

    @rx.function
    def step():
        def replica_step():
            return weight * (1.0 + rx.get_replica_context().replica_id_in_sync_group)

        return strategy.reduce("SUM", strategy.run(replica_step), axis=None)

    def elements() -> Iterator[np.ndarray]:
        for number in range(6):
            if how == "input" and is_culprit and number == 2:
                end(how)
            yield np.ones((2, 3), np.float32)

    with strategy.scope():
        weight = rx.Variable(np.ones(3, np.float32), name="weight")
    if how == "tracing":
        uneven_step(strategy, is_culprit)
    if how == "restore":
        on_all_workers("restore it", lambda: end(how) if is_culprit else None)
    dataset = strategy.distribute_datasets_from_function(lambda context: elements)
    for number, _ in enumerate(dataset):
        if how != "input" and is_culprit and number == 2:
            end(how)
        step()


def uneven_step(strategy: rx.Strategy, is_culprit: bool) -> None:
    """Raise on one worker only, while it traces what all would do eagerly if they could not."""

    @rx.function
    def step(rows):
        if is_culprit and isinstance(rows, jax.core.Tracer):
            end("tracing")
        return rx.get_replica_context().all_reduce("SUM", rows.sum())

    rows = np.ones(1 + strategy.cluster_resolver.task_id, np.float32)
    strategy.run(step, (strategy.experimental_distribute_values_from_function(lambda _: rows),))


def main(how: str, culprit: int) -> None:
    strategy = rx.MultiWorkerMirroredStrategy()
    if how == "hook":
        sys.excepthook = lambda kind, error, _: print("own hook:", kind.__name__, error, flush=True)
    if how == "thread":
        thread = threading.Thread(target=train, args=(strategy, how, culprit), name="trainer")
        thread.start()
        thread.join()
    elif how == "caught":
        try:
            train(strategy, how, culprit)
        except rx.errors.WorkerLost as error:
            print("caught:", error, flush=True)
            sys.exit(5)
    else:
        train(strategy, how, culprit)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
