"""Times of what workers do together, measured whenever the file for a delay appears.

Run as `round_trips.py FOLDER DELAYS` by each worker. It prints `ready N`, waits for `FOLDER/N`, and
prints one line of JSON, for every N below DELAYS; benchmarks/round_trips.py changes the network in
between.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import optax

import replicax as rx

CREATED = 4
FEW, MANY, FIRST = 2, 6, 3
TIMES, FED, FED_BEFORE = 7, 60, 60
TRAINED, SIZE = 3, 1000


def make_variables(strategy: rx.Strategy, count: int) -> list[rx.Variable]:
    with strategy.scope():
        return [rx.Variable(np.ones(SIZE, np.float32)) for _ in range(count)]


def train_step(optimizer: rx.Optimizer, variables: list[rx.Variable]) -> Callable[..., Any]:
    def step(rows: jax.Array) -> jax.Array:
        loss, gradients = rx.value_and_grad(
            lambda: sum((rows * each.value).sum() for each in variables), variables
        )()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def seconds(function: Callable[[], Any]) -> float:
    started = time.monotonic()
    jax.block_until_ready(function())
    return time.monotonic() - started


def feed(strategy: rx.Strategy, rows: int) -> Any:
    """Return endless batches, of so many rows for all replicas."""
    options = rx.InputOptions(auto_shard_policy=rx.AutoShardPolicy.DATA)
    data = rx.from_tensor_slices(np.ones((rows, SIZE), np.float32)).repeat().batch(rows)
    return iter(strategy.experimental_distribute_dataset(data, options))


def first_step(strategy: rx.Strategy, batch: Any, count: int) -> float:
    """Return the shortest first step of Adam with so many variables: most of it is compiling."""
    return min(_first_step(strategy, batch, count) for _ in range(FIRST))


def _first_step(strategy: rx.Strategy, batch: Any, count: int) -> float:
    variables = make_variables(strategy, count)
    with strategy.scope():
        optimizer = rx.Optimizer(optax.adam(1e-3))
    step = train_step(optimizer, variables)
    function = rx.function(lambda rows: strategy.run(step, args=(rows,)))
    return seconds(lambda: function(batch).values)


def main(folder: Path, delays: int) -> None:
    strategy = rx.MultiWorkerMirroredStrategy()
    replicas = strategy.num_replicas_in_sync
    variables = make_variables(strategy, TRAINED)
    with strategy.scope():
        optimizer = rx.Optimizer(optax.sgd(1e-3))
    step = train_step(optimizer, variables)
    even, uneven = feed(strategy, 2 * replicas), feed(strategy, 2 * replicas + 1)
    batch = next(even)

    plain = rx.function(lambda rows: strategy.run(step, args=(rows,)))
    alone = rx.function(lambda rows: strategy.run(lambda rows: rows.sum(), args=(rows,)))

    @rx.function
    def reduced(rows: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(rows,)), axis=None)

    def summing(rows: jax.Array) -> Any:
        replica = rx.get_replica_context()
        assert replica is not None
        return replica.all_reduce("SUM", step(rows))

    inside = rx.function(lambda rows: strategy.run(summing, args=(rows,)))

    def eager(rows: Any) -> Any:
        return strategy.run(step, args=(rows,)).values

    def eager_and_reduced(rows: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(rows,)), axis=None)

    repeated: dict[str, Callable[[], Any]] = {
        "step": lambda: plain(batch).values,
        "reduced": lambda: reduced(batch),
        "summed inside": lambda: inside(batch).values,
        "uneven": lambda: plain(next(uneven)).values,
        "eager": lambda: eager(next(uneven)),
        "eager, reduced": lambda: eager_and_reduced(next(uneven)),
    }
    for function in repeated.values():
        seconds(function)
    first_step(strategy, batch, FEW)
    first_step(strategy, batch, MANY)
    for number in range(delays):
        print(f"ready {number}", flush=True)
        while not (folder / str(number)).exists():
            time.sleep(0.05)
        times = {
            "create": seconds(lambda: [v.value for v in make_variables(strategy, CREATED)])
            / CREATED,
            "adam": (first_step(strategy, batch, MANY) - first_step(strategy, batch, FEW))
            / (MANY - FEW),
        }
        for _ in range(FED_BEFORE):
            alone(next(even))
        times["fed"] = seconds(lambda: [alone(next(even)).values for _ in range(FED)]) / FED
        for name, function in repeated.items():
            times[name] = median(seconds(function) for _ in range(TIMES))
        print(json.dumps(times), flush=True)
    for iterator in (even, uneven):
        iterator.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
