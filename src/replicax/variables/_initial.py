"""With which value a variable begins, where several workers make it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from replicax import cluster
from replicax.errors import CollectiveMismatch
from replicax.values import Mirrored, PerReplica
from replicax.variables._variable import VariableRequest

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


def from_first_worker(
    strategy: StrategyLike, request: VariableRequest, array: jax.Array
) -> Mirrored:
    """The value that the first worker has, on all devices; the others' are of no account."""
    topology = strategy.topology
    if not topology.spans_processes:
        return Mirrored.from_array(topology.replicate(array), topology)
    session = cluster.current()
    label = f"the creation of variable {request.name!r}"
    made = session.meet(label, [list(array.shape), str(array.dtype)])
    if any(each != made[0] for each in made):
        seen = "; ".join(
            f"{name} has shape {tuple(shape)} and dtype {dtype}"
            for name, (shape, dtype) in zip(session.members.names, made, strict=True)
        )
        raise CollectiveMismatch(
            f"Variable {request.name!r} does not begin alike on all workers: {seen}. Create the "
            "same variables in the same order on every worker."
        )
    copies = jax.device_put([array] * len(topology.local_devices), list(topology.local_devices))
    own = PerReplica(copies, topology, shapes=[array.shape] * topology.num_replicas)
    return strategy.collectives.broadcast(own)
