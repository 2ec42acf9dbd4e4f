"""How a replica's tensors lie on its logical devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from replicax import _context

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


def lay_out(array: jax.Array, spec: PartitionSpec, strategy: StrategyLike) -> jax.Array:
    """The same array, on the logical devices of the replica whose code this is; or of all."""
    frame, topology = _context.current(), strategy.topology
    if topology.logical_devices_per_replica == 1:
        return array
    if frame.program is not None and frame.program.inside:
        # Without a mesh: that of the program has the replicas' axis in another role here.
        return jax.lax.with_sharding_constraint(array, spec)
    home = frame.replica.home if frame.replica is not None else topology.replicated
    assert isinstance(home, NamedSharding)
    sharding = NamedSharding(home.mesh, spec)
    if isinstance(array, Tracer):
        return jax.lax.with_sharding_constraint(array, sharding)
    return jax.device_put(array, sharding)
