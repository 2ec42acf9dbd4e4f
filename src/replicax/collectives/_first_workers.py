"""Arrays of the first worker, brought to all devices in few exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from replicax.collectives._across_arrays import AcrossArrays
from replicax.topology import Topology
from replicax.values import Mirrored, PerReplica

# A larger array travels on its own: a copy of it on the host would cost more than an exchange.
_PACK_BYTES = 2**25


def first_workers(
    arrays: Sequence[jax.Array], topology: Topology
) -> Iterator[tuple[int, Mirrored]]:
    """Yield the index of each array and the first worker's value of it, pack by pack.

    All workers have arrays of the same shapes.
    """
    for pack in _packs(arrays):
        if len(pack) == 1:
            yield pack[0], _from_first_worker(arrays[pack[0]], topology)
            continue
        hosted = [np.asarray(arrays[index]) for index in pack]
        # They travel as bytes, so that one exchange is enough for all dtypes.
        packed = np.concatenate([np.ravel(array).view(np.uint8) for array in hosted])
        theirs = np.asarray(_from_first_worker(packed, topology).primary)
        ends = np.cumsum([array.nbytes for array in hosted])
        for index, array, part in zip(pack, hosted, np.split(theirs, ends[:-1]), strict=True):
            value = part.view(array.dtype).reshape(array.shape)
            yield index, Mirrored.from_array(topology.replicate(value), topology)


def _packs(arrays: Sequence[jax.Array]) -> list[list[int]]:
    """Return the indices of the arrays in each pack."""
    packs: list[list[int]] = []
    room = 0
    for index, array in enumerate(arrays):
        keys = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)  # Keys have no bytes.
        size = _PACK_BYTES if keys else array.nbytes
        if size > room:
            packs.append([])
            room = _PACK_BYTES
        packs[-1].append(index)
        room -= size
    return packs


def _from_first_worker(array: jax.Array | np.ndarray, topology: Topology) -> Mirrored:
    copies = jax.device_put([array] * len(topology.local_shardings), list(topology.local_shardings))
    own = PerReplica(copies, topology, shapes=[array.shape] * topology.num_replicas)
    return AcrossArrays(topology).broadcast(own)
