"""Small programs that some versions of jaxlib compute wrongly, or crash on.

This file is run by its path, so that nothing but JAX is imported. The arguments are the names of
checks; a line of JSON is printed after each, so that the parent knows which one crashed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

MARKER = "replicax-numbers "


def main(names: list[str]) -> None:
    """Run the named checks."""
    jax.config.update("jax_num_cpu_devices", 2)
    for name in names:
        got, expected = CHECKS[name]()
        print(MARKER + json.dumps({"name": name, "got": got, "expected": expected}), flush=True)


def _products(dtype: type, rows: int) -> tuple[float, float]:
    """Square the lengths of vectors: the program of jax-ml/jax#39103."""
    with jax.enable_x64(dtype is np.float64):
        numbers = np.arange(rows, dtype=dtype)
        vectors = jnp.asarray(np.stack([numbers, 0 * numbers, 0 * numbers], axis=1))
        matrix = jnp.eye(3, dtype=dtype)
        squared = jax.jit(jax.vmap(lambda vector: jnp.sum((matrix @ vector) ** 2)))
        return float(squared(vectors)[-1]), float(numbers[-1]) ** 2


def _empty_in_sum() -> tuple[list[float], list[float]]:
    """Sum an empty array, together with another one, over two devices."""
    mesh = jax.make_mesh((2,), ("device",), axis_types=(AxisType.Auto,))
    everywhere = PartitionSpec()

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    def sums(arrays: list[jax.Array]) -> list[jax.Array]:
        return [jax.lax.psum(array, "device") for array in arrays]

    numbers, empty = sums([jnp.arange(3.0), jnp.zeros((0, 3))])
    return [*numbers.tolist(), *empty.ravel().tolist()], [0.0, 2.0, 4.0]


def _rank_7() -> tuple[float, float]:
    """Sum a product that has a dimension of size 1 along another one: jax-ml/jax#40412."""
    ones = jnp.ones((3, 1, 2, 2, 8, 8, 8))
    return float(jnp.max(jax.jit(lambda x, y: jnp.sum(x * y, axis=3))(ones, ones))), 2.0


def _rank_8() -> tuple[float, float]:
    """Sum a product with a broadcast array along a dimension: jax-ml/jax#39257."""
    few, many = jnp.ones((2, 4, 6)), jnp.ones((2, 4, 6, 9, 9, 9, 9, 9))

    @jax.jit
    def reduced(few: jax.Array, many: jax.Array) -> jax.Array:
        return jnp.sum(few[..., None, None, None, None, None] * many, axis=2)

    return float(jnp.max(reduced(few, many))), 6.0


CHECKS: dict[str, Callable[[], tuple[object, object]]] = {
    "float32 products": lambda: _products(np.float32, 32_769),
    "float64 products": lambda: _products(np.float64, 16_385),
    "empty in a sum": _empty_in_sum,
    "rank-7 reduction": _rank_7,
    "rank-8 reduction": _rank_8,
}

if __name__ == "__main__":
    main(sys.argv[1:])
