"""Batches that are plain arrays: their rows, divided over the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from replicax import _context, _nest, cluster
from replicax._describing import described
from replicax._hints import hint
from replicax._typing import Leaf, Nest
from replicax.errors import InvalidType, ShapeMismatch
from replicax.execution import NotOneProgram
from replicax.input import count_rows, shares
from replicax.topology import Topology
from replicax.values import Mirrored, PerReplica, is_numeric, is_split, place

_MANY_ROWS = 32  # An argument with this many rows looks like a batch.


def split_nest(nest: Nest, topology: Topology) -> Nest:
    """Return the nest with the rows of each array divided into one part per replica."""
    leaves, structure = _nest.flatten(nest)
    arrays = [_array(leaf) for leaf in leaves]
    rows = count_rows(arrays, structure)
    _require_same_everywhere(arrays, topology)
    sizes = shares(rows, topology.num_replicas)
    return jax.tree.unflatten(structure, [_split(array, sizes, topology) for array in arrays])


def _split(array: jax.Array, sizes: Sequence[int], topology: Topology) -> PerReplica:
    even = len(set(sizes)) == 1
    if _context.current().program is not None:
        if not even:
            raise NotOneProgram
        constrained = jax.lax.with_sharding_constraint(jnp.asarray(array), topology.split)
        return PerReplica.from_array(constrained, topology)
    if even and not topology.spans_processes:
        return PerReplica.from_array(jax.device_put(array, topology.split), topology)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        if not is_split(array, topology):
            raise InvalidType(
                f"`split` got an array of shape {array.shape} over the devices of several workers "
                f"that is not divided over the replicas: {array.sharding}. Give it an array of "
                "this process, or one that is laid out by rows over the replicas."
            )
        return PerReplica.from_array(array, topology)
    bounds = list(pairwise(accumulate(sizes, initial=0)))
    parts = [
        place(array[slice(*bounds[replica])], sharding)
        for replica, sharding in zip(topology.local_replicas, topology.local_shardings, strict=True)
    ]
    shapes = [(size, *array.shape[1:]) for size in sizes]
    return PerReplica(parts, topology, shapes=shapes)


def _array(leaf: object) -> Leaf:
    if isinstance(leaf, Mirrored):
        leaf = leaf.primary
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise _no_array(leaf) from error
    if isinstance(leaf, PerReplica) or not is_numeric(array.dtype):
        raise _no_array(leaf)
    return array


def _no_array(leaf: object) -> InvalidType:
    return InvalidType(
        f"`split` divides the rows of arrays over the replicas; got {described(leaf)}. Give it "
        "arrays of numbers, or make per-replica values of other things by "
        "`experimental_distribute_values_from_function`."
    )


def _require_same_everywhere(arrays: Sequence[jax.Array], topology: Topology) -> None:
    """Refuse arrays that differ in shape from the other workers': rows would be missing."""
    if not topology.spans_processes or _context.current().program is not None:
        return
    own = [[list(array.shape), str(array.dtype)] for array in arrays]
    everyones = cluster.current().all_gather("dividing rows by `split`", own)
    for worker, theirs in enumerate(everyones):
        if theirs != own:
            raise ShapeMismatch(
                f"`split` got {_in_words(own)} on this worker, and {_in_words(theirs)} on worker "
                f"{worker}. Give every worker the same batch, of which it keeps the rows of its "
                "own replicas."
            )


def _in_words(kinds: Sequence[Any]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds) or "nothing"


def has_arrays(nest: Nest) -> bool:
    """Tell whether a nest has arrays that are not part of another object."""
    leaves = _nest.leaves(nest, keep_opaque=True)
    return any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves)


def by_layout(nest: Nest, topology: Topology) -> Nest:
    """Return arguments of `run`, with arrays that lie over the replicas as per-replica values.

    Such an array is divided by rows over the devices of the strategy, one part per replica.
    """
    program = _context.current().program

    def divided(leaf: Leaf) -> Leaf:
        if program is not None and program.is_split(leaf, topology):
            return PerReplica.from_array(leaf, topology)
        if not is_split(leaf, topology):
            return leaf
        # It is in place already, but the user's mesh may have explicit axes.
        return PerReplica.from_array(jax.device_put(leaf, topology.split), topology)

    return _nest.transform(divided, nest, keep_opaque=True)


def hint_of_whole_batches(arguments: Sequence[Nest], replicas: int) -> bool:
    """Hint at an undivided argument that looks like a batch; tell whether there is one."""
    for argument in arguments:
        rows = _rows_of_batch(argument)
        if rows is not None:
            hint(
                f"Each of {replicas} replicas got all {rows} rows of an argument of `run` that "
                "looks like a batch, and all of them compute the same. Divide it: "
                "`strategy.split(batch)`, or use a distributed dataset. If it is no batch, give it "
                "to the function by a closure or in a nest with other arrays."
            )
            return True
    return False


def _rows_of_batch(argument: Nest) -> int | None:
    """Return the number of rows of an apparent batch: arrays with equally many rows."""
    leaves = _nest.leaves(argument, keep_opaque=True)
    if not all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in leaves):
        return None
    sizes = {leaf.shape[:1] for leaf in leaves}
    if len(sizes) != 1 or sizes == {()} or max(leaf.ndim for leaf in leaves) < 2:
        return None
    rows = next(iter(sizes))[0]
    own = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)]
    return rows if rows >= _MANY_ROWS and all(leaf.is_fully_addressable for leaf in own) else None
