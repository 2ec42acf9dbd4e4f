"""The layout of a replica's tensors on its logical devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from replicax import _context
from replicax.errors import ContextError

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


def lay_out(array: jax.Array, spec: PartitionSpec, strategy: StrategyLike) -> jax.Array:
    """Lay out an array on the logical devices of the replica whose code is running, or of all."""
    frame, topology = _context.current(), strategy.topology
    if topology.logical_devices_per_replica == 1:
        return array
    if frame.program is not None and frame.program.inside:
        # No mesh is given, as the program's has the replicas' axis in another role here.
        return jax.lax.with_sharding_constraint(array, spec)
    if frame.strategy not in (None, strategy.identity):
        raise ContextError(
            f"Values are laid out on the logical devices of {strategy!r}, in code of its replicas. "
            f"Current context: {frame}. Call the method of the strategy that runs the code."
        )
    sharding = NamedSharding(topology.mesh, spec)
    copy = frame.copy if frame.replica is None else frame.replica.local_index
    if copy is not None and frame.program is None:
        sharding = topology.local_shardings_by(spec)[copy]
    if isinstance(array, Tracer):
        return jax.lax.with_sharding_constraint(array, sharding)
    return jax.device_put(array, sharding)
