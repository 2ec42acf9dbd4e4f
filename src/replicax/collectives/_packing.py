"""Small arrays travel together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

# Measured on two virtual CPU devices, one process: six gradients of a small network (106 kB in all)
# take 0.9 ms as six all-reduces and 0.55 ms as one; 2.7 MB take 6.2 ms apart and 14.7 ms packed.
SMALL_BYTES = 128 * 1024
PACK_BYTES = 512 * 1024


def in_packs(
    reduce: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array], bytes_per_pack: int
) -> list[jax.Array]:
    """`reduce` of every array, for a `reduce` that works element by element.

    Arrays of one dtype that are small go through it together, in packs of at most
    `bytes_per_pack` (0: as measured); the others alone.
    """
    limit = bytes_per_pack or PACK_BYTES
    small = bytes_per_pack or SMALL_BYTES
    results: dict[int, jax.Array] = {}
    packs: dict[object, list[int]] = {}
    filled: dict[object, int] = {}

    def send(indices: list[int]) -> None:
        if len(indices) == 1:
            results[indices[0]] = reduce(arrays[indices[0]])
            return
        together = reduce(jnp.concatenate([arrays[i].ravel() for i in indices]))
        start = 0
        for i in indices:
            end = start + arrays[i].size
            results[i] = together[start:end].reshape(arrays[i].shape)
            start = end

    for index, array in enumerate(arrays):
        if array.nbytes > small:
            send([index])
            continue
        if filled.get(array.dtype, 0) + array.nbytes > limit:
            send(packs.pop(array.dtype))
            filled[array.dtype] = 0
        packs.setdefault(array.dtype, []).append(index)
        filled[array.dtype] = filled.get(array.dtype, 0) + array.nbytes
    for indices in packs.values():
        send(indices)
    return [results[index] for index in range(len(arrays))]
