"""Reduce-scatters among workers, compared with all-reduces of the same arrays.

python -m replicax launch --workers 2 --devices-per-worker 1 scattered_sums.py ROUNDS
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax.collectives import dispatch

MIB = 2**20


def main(rounds):
    strategy = rx.MultiWorkerMirroredStrategy()
    topology = strategy.extended.topology
    replicas = topology.num_replicas

    def differences(seed, rows):
        """Sum integers, which add up exactly in any order, in both ways, and others beside them."""
        own = jax.lax.axis_index("replica")
        values = jax.random.randint(
            jax.random.fold_in(jax.random.key(seed), own), (rows, 256), -1000, 1000
        ).astype(jnp.float32)
        others = [values[:7].sum() + own, values[0] * 2]
        scattered = jax.lax.psum_scatter(values, "replica", scatter_dimension=0, tiled=True)
        columns = jax.lax.psum_scatter(values, "replica", scatter_dimension=1, tiled=True)
        sums = jax.lax.psum([values, *others], "replica")
        rows_here, columns_here = rows // replicas, 256 // replicas
        expected = jax.lax.dynamic_slice_in_dim(sums[0], own * rows_here, rows_here, 0)
        across = jax.lax.dynamic_slice_in_dim(sums[0], own * columns_here, columns_here, 1)
        whole = jax.lax.all_gather(scattered, "replica", axis=0, tiled=True)
        return jnp.stack(
            [
                jnp.abs(scattered - expected).max(),
                jnp.abs(columns - across).max(),
                jnp.abs(whole - sums[0]).max(),
            ]
        )[None]

    programs = {}
    for number in range(rounds):
        mib = (1, 2, 5, 16, 64)[number % 5]
        rows = mib * MIB // 1024 // replicas * replicas
        if rows not in programs:
            programs[rows] = jax.jit(
                jax.shard_map(
                    lambda seed, rows=rows: differences(seed, rows),
                    mesh=topology.mesh,
                    in_specs=P(),
                    out_specs=P("replica"),
                    check_vma=False,
                )
            )
        seed = topology.replicate(np.int32(number))
        found = dispatch(topology, "the comparison of sums", programs[rows], seed)
        worst = np.max([np.asarray(shard.data) for shard in found.addressable_shards], axis=0)
        assert not worst.any(), f"round {number}, {mib} MiB: differences of {worst.tolist()}"
    print(f"{rounds} rounds agree")


if __name__ == "__main__":
    main(int(sys.argv[1]))
