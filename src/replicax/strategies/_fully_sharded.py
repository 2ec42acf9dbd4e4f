"""One replica on each device of this machine, with the state divided over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from replicax._typing import DeviceLike
from replicax.collectives import CommunicationOptions
from replicax.strategies._extended import StrategyExtended
from replicax.strategies._strategy import Strategy
from replicax.topology import Topology, best_devices
from replicax.variables import ShardedPlacement, VariablePartitioner

# Gradients of divided variables travel by themselves, so that each replica gets its part only.
_OPTIONS = CommunicationOptions(bytes_per_pack=64 * 1024 - 1)


@final
class FullyShardedStrategy(Strategy):
    """One replica per device, each of which keeps a part of every large variable and slot.

    Programs see what they see under `MirroredStrategy`: variables are gathered when they are read.

    Args:
      devices: The devices; by default all of the best kind there is.
      variable_partitioner: A function of a shape and a dtype that returns the number of parts for
        each dimension. At most one may be greater than 1: this dimension is divided over the
        replicas. By default variables of at least 64 KiB are divided, along their largest dimension
        that divides by the number of replicas.

    >>> import jax.numpy as jnp, replicax as rx
    >>> strategy = rx.FullyShardedStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     weight = rx.Variable(jnp.zeros((512, 64)))
    >>> weight.shape
    (512, 64)
    """

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        *,
        variable_partitioner: VariablePartitioner | None = None,
    ) -> None:
        super().__init__(
            StrategyExtended(
                self,
                topology=Topology.of(best_devices() if devices is None else devices),
                placement=ShardedPlacement(variable_partitioner),
                communication_options=_OPTIONS,
            )
        )
