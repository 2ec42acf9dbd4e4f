"""JAX by hand: several training steps per call, a `lax.scan` inside the `jit(shard_map)`."""

from __future__ import annotations

from collections.abc import Callable

import jax
from _batches import stacks_of
from _problem import STEPS_A_CALL, Cell, problem_of
from _protocol import serve
from jax.sharding import PartitionSpec
from jax_shard_map import AXIS, Layers, Training, layers_of, step_of, use_cpus


def build(cell: Cell) -> Callable[[], float]:
    use_cpus(cell.replicas)
    step = step_of(cell)

    def steps(layers: Layers, rows: jax.Array, labels: jax.Array) -> tuple[Layers, jax.Array]:
        layers, losses = jax.lax.scan(
            lambda layers, batch: step(layers, *batch), layers, (rows, labels)
        )
        return layers, losses[-1]

    training = Training(layers_of(problem_of(cell)), steps, PartitionSpec(None, AXIS))
    stacks = stacks_of(cell, STEPS_A_CALL)
    return lambda: float(training.train(training.put(next(stacks))))


if __name__ == "__main__":
    serve(build, {"jax": jax.__version__})
