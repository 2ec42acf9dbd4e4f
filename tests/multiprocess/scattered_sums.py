"""Parts of sums over the workers, compared with sums that each worker computes by itself.

python -m replicax launch --workers 2 --devices-per-worker 1 scattered_sums.py ROUNDS
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax.collectives import dispatch
from replicax.variables import Division, part_of_sum, replicax_gather

MIB = 2**20


def main(rounds):
    topology = rx.MultiWorkerMirroredStrategy().extended.topology
    replicas = topology.num_replicas

    def differences(seed, rows):
        """Sum whole numbers, which add up exactly in any order, in parts of rows and of columns."""
        shape = rows, 256
        keys = [jax.random.fold_in(jax.random.key(seed), replica) for replica in range(replicas)]
        numbers = [jax.random.randint(key, shape, -1000, 1000).astype(jnp.float32) for key in keys]
        own = jax.lax.axis_index("replica")
        mine = jnp.stack(numbers)[own]
        beside = jax.lax.psum([mine[:7].sum(), mine[0]], "replica")
        found = [jnp.abs(beside[1] - sum(each[0] for each in numbers)).max()]
        for axis in (0, 1):
            division = Division(axis, shape[axis], replicas)
            part = part_of_sum(mine, division, scatters=topology.scatters_sums)
            whole = replicax_gather(part, division)
            found.append(jnp.abs(whole - sum(numbers)).max())
        return jnp.stack(found)[None]

    programs = {}
    for number in range(rounds):
        mib = (1, 2, 5, 16, 64)[number % 5]
        rows = mib * MIB // 1024
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
