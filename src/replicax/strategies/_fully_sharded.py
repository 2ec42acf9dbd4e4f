"""One replica on each device, with the state divided over all of them, on one or more machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from replicax._typing import DeviceLike
from replicax.cluster import ClusterResolver
from replicax.collectives import CommunicationOptions
from replicax.strategies._extended import StrategyExtended
from replicax.strategies._multi_worker import multi_worker
from replicax.strategies._strategy import Strategy
from replicax.topology import Topology, best_devices
from replicax.variables import ShardedPlacement, VariablePartitioner


@final
class FullyShardedStrategy(Strategy):
    """One replica per device, each keeping a part of every large variable and slot.

    Programs see the same as under `MirroredStrategy`: variables are gathered when they are read.

    Args:
      devices: The devices; by default all devices of the best kind available.
      variable_partitioner: A function of a shape and a dtype that returns the number of parts for
        each dimension. At most one may be greater than 1: that dimension is divided over the
        replicas. By default variables of at least 64 KiB are divided, along their largest dimension
        that is divisible by the number of replicas.
      regather: Whether compiled functions that compute gradients gather variables once more for
        the backward pass, instead of keeping them whole from the forward pass on.
      logical_devices_per_replica: How many consecutive devices form a replica. Variables that
        `extended.partition` divides over these are divided over the replicas as well.

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
        regather: bool = True,
        logical_devices_per_replica: int = 1,
    ) -> None:
        super().__init__(
            StrategyExtended(
                self,
                topology=Topology.of(
                    best_devices() if devices is None else devices,
                    logical_devices_per_replica=logical_devices_per_replica,
                ),
                placement=ShardedPlacement(variable_partitioner, regather=regather),
                communication_options=CommunicationOptions(
                    bytes_per_pack=ShardedPlacement.bytes_per_pack
                ),
            )
        )


@final
class MultiWorkerFullyShardedStrategy(Strategy):
    """One replica on each device of every worker, each keeping a part of the state.

    Programs see the same as under `MultiWorkerMirroredStrategy`, with one difference: outside of
    compiled functions all workers must read a divided variable together, because each has a part.

    Args:
      cluster_resolver: Knows the workers, and which of them this process is; by default that of the
        first environment found: TF_CONFIG, Slurm, Kubernetes, TPU (docs/clusters.md).
      communication_options: How values are combined unless a call says otherwise.
      variable_partitioner: Chooses the divided dimension, as for `FullyShardedStrategy`.
      regather: As for `FullyShardedStrategy`.
      logical_devices_per_replica: How many consecutive devices of a worker form a replica.

    >>> import replicax as rx
    >>> strategy = rx.MultiWorkerFullyShardedStrategy()
    >>> strategy.num_replicas_in_sync == len(strategy.extended.worker_devices)
    True
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        variable_partitioner: VariablePartitioner | None = None,
        regather: bool = True,
        logical_devices_per_replica: int = 1,
    ) -> None:
        options = communication_options or CommunicationOptions()
        if isinstance(options, CommunicationOptions) and not options.bytes_per_pack:
            options = replace(options, bytes_per_pack=ShardedPlacement.bytes_per_pack)
        placement = ShardedPlacement(variable_partitioner, regather=regather)
        super().__init__(
            multi_worker(self, cluster_resolver, options, logical_devices_per_replica, placement)
        )
