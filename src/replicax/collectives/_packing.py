"""Small arrays travel together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp

from replicax.topology import Topology


@final
@dataclass(frozen=True, slots=True)
class PackSizes:
    """How large arrays may be that travel together, and how large a pack, in bytes."""

    small: int
    pack: int

    @classmethod
    def of(cls, topology: Topology, bytes_per_pack: int) -> PackSizes:
        """Those that are asked for; 0: those that are fastest for replicas over `topology`."""
        if bytes_per_pack:
            return cls(bytes_per_pack, bytes_per_pack)
        return _BETWEEN_PROCESSES if topology.spans_processes else _WITHIN_A_PROCESS


# Measured on two virtual CPU devices, one process: six gradients of a small network (106 kB in all)
# take 0.9 ms as six all-reduces and 0.55 ms as one; 2.7 MB take 6.2 ms apart and 14.7 ms packed.
_WITHIN_A_PROCESS = PackSizes(small=128 * 1024, pack=512 * 1024)
# Between two processes every all-reduce takes 1.5 ms more, however small: 4 MB take 6 ms as one and
# 9 ms as four; 23 MB, of which one array has 17, are not faster together.
_BETWEEN_PROCESSES = PackSizes(small=4 * 1024 * 1024, pack=4 * 1024 * 1024)
# XLA:CPU concatenates large arrays slowly (1 MB each: 9.4 ms a step, and 5.9 ms if they are written
# into a pack one by one), and compiles a program with many small ones written so slowly.
_MOST_TO_CONCATENATE = 128 * 1024
# As many arrays take their numbers from a pack at places that the program states.
_MOST_STATED_PLACES = 8


def in_packs(
    reduce: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array], sizes: PackSizes
) -> list[jax.Array]:
    """`reduce` of every array, for a `reduce` that works element by element.

    Arrays of one dtype that are small go through it together; the others alone.
    """
    results: dict[int, jax.Array] = {}
    packs: dict[object, list[int]] = {}
    filled: dict[object, int] = {}

    def send(indices: list[int]) -> None:
        together = [arrays[index] for index in indices]
        alone = len(together) == 1
        reduced = [reduce(together[0])] if alone else _unpack(reduce(_pack(together)), together)
        results.update(zip(indices, reduced, strict=True))

    for index, array in enumerate(arrays):
        if array.nbytes > sizes.small:
            send([index])
            continue
        if filled.get(array.dtype, 0) + array.nbytes > sizes.pack:
            send(packs.pop(array.dtype))
            filled[array.dtype] = 0
        packs.setdefault(array.dtype, []).append(index)
        filled[array.dtype] = filled.get(array.dtype, 0) + array.nbytes
    for indices in packs.values():
        send(indices)
    return [results[index] for index in range(len(arrays))]


def _pack(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return arrays one after another."""
    flat = [jax.lax.reshape(array, (array.size,)) for array in arrays]
    if len(arrays) > _MOST_STATED_PLACES and max(a.nbytes for a in arrays) <= _MOST_TO_CONCATENATE:
        return jax.lax.concatenate(flat, 0)
    pack = jax.lax.full((sum(array.size for array in arrays),), 0, arrays[0].dtype)
    for start, array in zip(_starts(arrays), flat, strict=True):
        pack = jax.lax.dynamic_update_slice(pack, array, (start,))
    return pack


def _unpack(pack: jax.Array, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the parts of a pack of `arrays`, each in the shape of its array."""
    starts: Sequence[Any] = _starts(arrays)
    if len(arrays) > _MOST_STATED_PLACES and jnp.issubdtype(pack.dtype, jnp.floating):
        starts = _hidden(starts, pack)
    parts = [
        jax.lax.dynamic_slice(pack, (start,), (array.size,))
        for start, array in zip(starts, arrays, strict=True)
    ]
    return [jax.lax.reshape(part, a.shape) for part, a in zip(parts, arrays, strict=True)]


def _starts(arrays: Sequence[jax.Array]) -> list[int]:
    """Return where each array of a pack begins."""
    return list(itertools.accumulate((array.size for array in arrays[:-1]), initial=0))


def _hidden(numbers: Sequence[int], pack: jax.Array) -> Sequence[jax.Array]:
    """Return numbers such that XLA does not know them while it compiles.

    What is computed with a part of a pack is a kernel that has the part's place in it. XLA:CPU
    compiles one per part if it knows the places, and one per shape if it does not: for the
    gradients of 100 variables 1.3 s instead of 4.2 s. So the numbers go through a loop, which never
    runs; that its condition is never true XLA does not find out.
    """
    first = jax.lax.stop_gradient(jax.lax.index_in_dim(pack, 0, keepdims=False))
    carried = (first, *map(jnp.int32, numbers))
    return jax.lax.while_loop(
        lambda carried: carried[0] > jnp.inf,
        lambda carried: (carried[0], *carried[2:], carried[1]),
        carried,
    )[1:]
