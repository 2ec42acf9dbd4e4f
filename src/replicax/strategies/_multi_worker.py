"""One replica on each device of several machines."""

from __future__ import annotations

from typing import final

import jax

from replicax import cluster
from replicax._environments import default_resolver
from replicax.cluster import ClusterResolver, Members
from replicax.collectives import CommunicationImplementation, CommunicationOptions
from replicax.errors import InvalidType
from replicax.strategies._extended import StrategyExtended
from replicax.strategies._strategy import Strategy
from replicax.topology import Topology, best_devices
from replicax.variables import MirroredPlacement, VariablePlacement


class MultiWorkerMirroredStrategy(Strategy):
    """One replica on each device of every worker, with equal copies of all variables.

    Each worker runs the same program, in which this must be the first thing that uses JAX. Without
    a cluster it uses the devices of this process.

    Args:
      cluster_resolver: Knows the workers, and which of them this process is; by default that of the
        first environment found: TF_CONFIG, Slurm, Kubernetes, TPU (docs/clusters.md).
      communication_options: How values are combined unless a call says otherwise. `timeout_seconds`
        is how long to wait for a worker that is alive, by default five minutes; `implementation`
        is a preference.
      logical_devices_per_replica: How many consecutive devices of a worker form a replica.

    >>> import replicax as rx
    >>> strategy = rx.MultiWorkerMirroredStrategy()
    >>> strategy.num_replicas_in_sync == len(strategy.extended.worker_devices)
    True
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        logical_devices_per_replica: int = 1,
    ) -> None:
        super().__init__(
            multi_worker(self, cluster_resolver, communication_options, logical_devices_per_replica)
        )

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the cluster."""
        resolver = super().cluster_resolver
        assert resolver is not None
        return resolver


@final
class ExperimentalMultiWorkerMirroredStrategy(MultiWorkerMirroredStrategy):
    """The same strategy, with the arguments that it had when it was experimental.

    Args:
      communication: Which library should carry the data, if there is a choice.
      cluster_resolver: Knows the workers, and which of them this process is.
    """

    def __init__(
        self,
        communication: CommunicationImplementation = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        super().__init__(cluster_resolver, CommunicationOptions(implementation=communication))


def multi_worker(
    strategy: Strategy,
    cluster_resolver: ClusterResolver | None,
    communication_options: CommunicationOptions | None,
    logical_devices_per_replica: int = 1,
    placement: VariablePlacement | None = None,
) -> StrategyExtended:
    """Return the parts of a strategy of several workers, which connect to each other here."""
    resolver = default_resolver() if cluster_resolver is None else cluster_resolver
    if not isinstance(resolver, ClusterResolver):
        raise InvalidType(
            f"`cluster_resolver` must be one of `rx.cluster_resolver`; got {cluster_resolver!r}."
        )
    options = communication_options or CommunicationOptions()
    if not isinstance(options, CommunicationOptions):
        raise InvalidType(
            "`communication_options` must be an `rx.experimental.CommunicationOptions`; got "
            f"{communication_options!r}."
        )
    members = Members.of(resolver)
    if members is not None:
        cluster.join(members, options.timeout_seconds)
    return StrategyExtended(
        strategy,
        topology=Topology.of(
            best_devices() if members is None else jax.devices(),
            logical_devices_per_replica=logical_devices_per_replica,
        ),
        placement=placement or MirroredPlacement(),
        communication_options=options,
        cluster_resolver=resolver,
    )
