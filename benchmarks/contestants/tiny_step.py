"""The smallest possible step, in replicax and by hand in JAX: the cost of first and later calls.

Both run in one process, on one mesh. Run as
`tiny_step.py '{"replicas": 2, "variables": 10, "rounds": 7, "calls": 200, "compiles": 3}'`, it
prints one line of JSON; overhead.py and scaling.py ask.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from _protocol import with_python
from _replicax import VERSIONS, mirrored_strategy
from jax.sharding import PartitionSpec

import replicax as rx

SIZE = 8
CONSTANT = np.ones(SIZE, np.float32)
WARMUP_CALLS = 10

Step = Callable[[], jax.Array]


class Contestant(Protocol):
    def build(self, *, collective: bool) -> Step:
        """Make a step that is not compiled yet; its result is summed over replicas if `collective`.

        When called, it returns an array to wait for.
        """
        ...

    def value(self) -> float:
        """Return the value of a variable."""
        ...


class Replicax:
    """A program whose step adds a constant to every variable, and sums each replica's rows."""

    def __init__(self, strategy: rx.Strategy, variables: int) -> None:
        self._strategy = strategy
        with strategy.scope():
            self._variables = [rx.Variable(np.zeros(SIZE, np.float32)) for _ in range(variables)]
        self._rows = strategy.experimental_distribute_values_from_function(lambda _: CONSTANT)

    def build(self, *, collective: bool) -> Step:
        strategy = self._strategy

        @rx.function
        def step(rows: Any) -> Any:
            for variable in self._variables:
                variable.assign_add(CONSTANT)
            sums = strategy.run(jnp.sum, args=(rows,))
            return strategy.reduce(rx.ReduceOp.SUM, sums, axis=None) if collective else sums

        if collective:
            return lambda: step(self._rows)
        return lambda: step(self._rows).array(strategy.topology)

    def value(self) -> float:
        return float(self._variables[-1].numpy()[0])


class Jax:
    """The same program by hand, with its arrays donated."""

    def __init__(self, strategy: rx.Strategy, variables: int) -> None:
        self._topology = strategy.topology
        self._arrays = [
            self._topology.replicate(np.zeros(SIZE, np.float32)) for _ in range(variables)
        ]
        rows = np.tile(CONSTANT, self._topology.num_replicas)
        self._rows = jax.device_put(rows, self._topology.split)

    def build(self, *, collective: bool) -> Step:
        mesh = self._topology.mesh
        axis = mesh.axis_names[0]
        split, same = PartitionSpec(axis), PartitionSpec()

        def sum_of_replica(rows: jax.Array) -> jax.Array:
            total = jnp.sum(rows)
            return jax.lax.psum(total, axis) if collective else total[None]

        def step(arrays: list[jax.Array], rows: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            sums = jax.shard_map(
                sum_of_replica,
                mesh=mesh,
                in_specs=split,
                out_specs=same if collective else split,
                check_vma=False,
            )(rows)
            return [array + CONSTANT for array in arrays], sums

        jitted = jax.jit(step, donate_argnums=0)

        def call() -> jax.Array:
            self._arrays, sums = jitted(self._arrays, self._rows)
            return sums

        return call

    def value(self) -> float:
        return float(self._arrays[-1].addressable_data(0)[0])


def measure(
    *, replicas: int, variables: int, rounds: int, calls: int, compiles: int
) -> dict[str, object]:
    """Measure the seconds of each first call, and of the median later call of each round."""
    strategy = mirrored_strategy(replicas)
    # The very first compilation costs more, and is not measured.
    for warmer in (Replicax(strategy, 1), Jax(strategy, 1)):
        seconds_of(warmer.build(collective=True))
    contestants: tuple[Contestant, ...] = (
        Replicax(strategy, variables),
        Jax(strategy, variables),
    )
    first_calls = [
        [seconds_of(contestant.build(collective=True)) for contestant in contestants]
        for _ in range(compiles)
    ]
    # There is no collective here: the time for replicas in threads to meet would hide the rest.
    steps = [contestant.build(collective=False) for contestant in contestants]
    take_turns(steps, WARMUP_CALLS)
    later_calls = [
        [median(seconds) for seconds in zip(*take_turns(steps, calls), strict=True)]
        for _ in range(rounds)
    ]
    expected = compiles + WARMUP_CALLS + rounds * calls
    for contestant in contestants:
        if contestant.value() != expected:
            raise AssertionError(
                f"{type(contestant).__name__} took {expected} steps, and its variables are "
                f"{contestant.value()}. They should be equal."
            )
    return {
        "first_calls": dict(zip(("replicax", "jax"), zip(*first_calls, strict=True), strict=True)),
        "later_calls": dict(zip(("replicax", "jax"), zip(*later_calls, strict=True), strict=True)),
        "versions": with_python(VERSIONS),
    }


def take_turns(steps: Sequence[Step], calls: int) -> list[list[float]]:
    """Return a row per turn: the seconds of one call of each step."""
    return [[seconds_of(step) for step in steps] for _ in range(calls)]


def seconds_of(step: Step) -> float:
    start = time.perf_counter()
    step().block_until_ready()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
