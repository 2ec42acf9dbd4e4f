"""The program that both processes of the self-test run."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import replicax as rx

MARKER = "replicax-self-test "
# Enough even for a machine that is busy with other work.
_TIMEOUT_SECONDS = 60.0
_LARGE_BYTES = 32_000_000


def main() -> None:
    """Form a cluster with the other worker, and print the results."""
    began = time.perf_counter()
    options = rx.experimental.CommunicationOptions(timeout_seconds=_TIMEOUT_SECONDS)
    strategy = rx.MultiWorkerMirroredStrategy(communication_options=options)
    together = time.perf_counter() - began
    report = {"together": together, "answers": answers(strategy), **measurements(strategy)}
    print(MARKER + json.dumps(report), flush=True)


def answers(strategy: rx.Strategy) -> list[dict[str, Any]]:
    """Return the joint results, and the expected ones for replicas 0 and 1."""
    numbers = _numbers(strategy, 1)
    gathered = strategy.gather(numbers, axis=0)
    results = (
        ("strategy.reduce", strategy.reduce("SUM", numbers, axis=None), [3.0]),
        ("strategy.gather", gathered, [1.0, 2.0]),
        ("compiled step", _weight_after_a_step(strategy, numbers), [0.25]),
    )
    return [
        {"name": name, "got": np.asarray(got).tolist(), "expected": expected}
        for name, got, expected in results
    ]


def measurements(strategy: rx.Strategy) -> dict[str, object]:
    """Return the seconds that reductions take: the median, and the best, less affected by load."""

    @rx.function
    def compiled(value: object) -> Any:
        return strategy.reduce("SUM", value, axis=None)

    def eager(value: object) -> object:
        return strategy.reduce("SUM", value, axis=None)

    one = _numbers(strategy, 1)
    many = _numbers(strategy, _LARGE_BYTES // 4)
    return {
        "small": _seconds(compiled, one, 200),
        "eager": _seconds(eager, one, 50),
        "large": _seconds(compiled, many, 5),
        "large_bytes": _LARGE_BYTES,
    }


def _numbers(strategy: rx.Strategy, count: int) -> Any:
    """Return `count` ones on replica 0, and twos on replica 1."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.full(count, context.replica_id_in_sync_group + 1, np.float32)
    )


def _weight_after_a_step(strategy: rx.Strategy, numbers: Any) -> object:
    import optax

    with strategy.scope():
        weight = rx.Variable(np.ones(1, np.float32))
        optimizer = rx.Optimizer(optax.sgd(0.25))  # 1 - 0.25 * (1 + 2), exact in binary

    @rx.function
    def step(numbers: Any) -> None:
        def replica_step(number: Any) -> None:
            gradient = rx.grad(lambda: (weight * number).sum(), weight)()
            optimizer.apply_gradients([(gradient, weight)])

        strategy.run(replica_step, args=(numbers,))

    step(numbers)
    return weight.numpy()


def _seconds(reduce: Callable[[Any], object], value: object, times: int) -> dict[str, float]:
    jax.block_until_ready(reduce(value))  # the first call compiles
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        jax.block_until_ready(reduce(value))
        seconds.append(time.perf_counter() - began)
    return {"median": statistics.median(seconds), "best": min(seconds)}


if __name__ == "__main__":
    main()
