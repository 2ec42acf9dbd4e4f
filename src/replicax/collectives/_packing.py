"""Packs, in which small arrays travel together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax.topology import Topology

# Measured on two virtual CPU devices, one process: six gradients of a small network (106 kB in all)
# take 0.9 ms as six all-reduces and 0.55 ms as one; 2.7 MB take 6.2 ms apart and 14.7 ms packed.
_SMALL, _PACK = 128 * 1024, 512 * 1024
# Between two processes every all-reduce takes 1.5 ms more, however small: 4 MB take 6 ms as one and
# 9 ms as four; 23 MB, of which one array has 17, are no faster together.
_PACK_BETWEEN_PROCESSES = 4 * 1024 * 1024
# XLA:CPU concatenates large arrays slowly: with three of 1 MB a step takes 9.4 ms, and 5.9 ms if
# they are written into the pack one by one. With many small arrays, that compiles more slowly.
_MOST_TO_CONCATENATE = 128 * 1024
_MOST_TO_WRITE = 8


@final
@dataclass(frozen=True, slots=True)
class PackRules:
    """The rules by which arrays travel together.

    Args:
      small: The largest size, in bytes, of an array that does not travel alone.
      pack: The largest size of a pack, in bytes.
      hides_places: Whether XLA must not know where in a pack each array is; see `_hidden`.
    """

    small: int
    pack: int
    hides_places: bool

    @classmethod
    def of(cls, topology: Topology, bytes_per_pack: int) -> PackRules:
        """Return the rules for packs of a given size; for 0, the fastest ones on `topology`."""
        if bytes_per_pack:
            return cls(bytes_per_pack, bytes_per_pack, topology.on_cpus)
        if topology.spans_processes:
            return cls(_PACK_BETWEEN_PROCESSES, _PACK_BETWEEN_PROCESSES, topology.on_cpus)
        return cls(_SMALL, _PACK, topology.on_cpus)


def in_packs(
    reduce: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array], rules: PackRules
) -> list[jax.Array]:
    """Return `reduce` of every array, for a `reduce` that works element by element.

    Small arrays of one dtype go through `reduce` together; the others go alone.
    """
    results: dict[int, jax.Array] = {}
    packs: dict[object, list[int]] = {}
    filled: dict[object, int] = {}

    def send(indices: list[int]) -> None:
        together = [arrays[index] for index in indices]
        if len(together) == 1:
            reduced = [reduce(together[0])]
        else:
            reduced = _unpack(reduce(packed(together)), together, rules.hides_places)
        results.update(zip(indices, reduced, strict=True))

    for index, array in enumerate(arrays):
        if array.nbytes > rules.small:
            send([index])
            continue
        if filled.get(array.dtype, 0) + array.nbytes > rules.pack:
            send(packs.pop(array.dtype))
            filled[array.dtype] = 0
        packs.setdefault(array.dtype, []).append(index)
        filled[array.dtype] = filled.get(array.dtype, 0) + array.nbytes
    for indices in packs.values():
        send(indices)
    return [results[index] for index in range(len(arrays))]


def packed(arrays: Sequence[jax.Array]) -> jax.Array:
    """Concatenate arrays into a pack."""
    flat = [jax.lax.reshape(array, (array.size,)) for array in arrays]
    largest = max(array.nbytes for array in arrays)
    if len(arrays) > _MOST_TO_WRITE and largest <= _MOST_TO_CONCATENATE:
        return jax.lax.concatenate(flat, 0)
    pack = jax.lax.full((sum(array.size for array in arrays),), 0, arrays[0].dtype)
    for start, array in zip(_starts(arrays), flat, strict=True):
        pack = jax.lax.dynamic_update_slice(pack, array, (start,))
    return pack


def _unpack(pack: jax.Array, arrays: Sequence[jax.Array], hides_places: bool) -> list[jax.Array]:
    """Return the parts of a pack of `arrays`, each in the shape of its array."""
    starts: Sequence[Any] = _starts(arrays)
    if hides_places and len(arrays) > _MOST_TO_WRITE and jnp.issubdtype(pack.dtype, jnp.floating):
        starts = _hidden(starts, pack)
    parts = [
        # By default, JAX would have XLA compute for each start whether it counts from the end.
        jax.lax.dynamic_slice(pack, (start,), (array.size,), allow_negative_indices=False)
        for start, array in zip(starts, arrays, strict=True)
    ]
    return [jax.lax.reshape(part, a.shape) for part, a in zip(parts, arrays, strict=True)]


def _starts(arrays: Sequence[jax.Array]) -> list[int]:
    """Return where each array of a pack begins."""
    return list(itertools.accumulate((array.size for array in arrays[:-1]), initial=0))


def _hidden(numbers: Sequence[int], pack: jax.Array) -> Sequence[jax.Array]:
    """Return the numbers in a form in which XLA does not know them when it compiles.

    A kernel that computes with part of a pack contains the place of that part. XLA:CPU compiles one
    kernel per part if it knows the places, and one per shape if it does not: for the gradients of
    100 variables, that takes 1.3 s instead of 4.2 s. So the numbers go through a loop that never
    runs; XLA does not find out that its condition is never true.
    """
    first = jax.lax.stop_gradient(jax.lax.index_in_dim(pack, 0, keepdims=False))
    carried = (first, *map(jnp.int32, numbers))
    return jax.lax.while_loop(
        lambda carried: carried[0] > jnp.inf,
        lambda carried: (carried[0], *carried[2:], carried[1]),
        carried,
    )[1:]
