"""The smallest possible step by hand in JAX.

replicax is not imported here: a process that measures JAX alone does without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _tiny_program import CONSTANT, WEIGHT, Program
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_shard_map import AXIS, SAME, SPLIT

Step = Callable[[], jax.Array]


def sum_through_layers(rows: jax.Array, layers: int) -> jax.Array:
    for _ in range(layers):
        rows = jnp.tanh(rows @ WEIGHT)
    return jnp.sum(rows)


class Jax:
    """The program by hand, with its arrays donated."""

    def __init__(self, program: Program, replicas: int) -> None:
        self._program = program
        self._mesh = Mesh(np.array(jax.devices()[:replicas]), (AXIS,))
        self._arrays = self._put(program.zeros, SAME)
        self._rows = self._put(np.tile(program.batch, (replicas, 1)), SPLIT)

    def build(self, *, collective: bool) -> Step:
        def sum_of_replica(rows: jax.Array) -> jax.Array:
            total = sum_through_layers(rows, self._program.layers)
            return jax.lax.psum(total, AXIS) if collective else total[None]

        def step(arrays: list[jax.Array], rows: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            sums = jax.shard_map(
                sum_of_replica,
                mesh=self._mesh,
                in_specs=SPLIT,
                out_specs=SAME if collective else SPLIT,
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

    def _put(self, arrays: Any, split: PartitionSpec) -> Any:
        return jax.device_put(arrays, NamedSharding(self._mesh, split))
