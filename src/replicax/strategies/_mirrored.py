"""One replica on each device of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from replicax._typing import DeviceLike
from replicax.collectives import CrossDeviceOps, require_cross_device_ops
from replicax.strategies._extended import StrategyExtended
from replicax.strategies._strategy import Strategy
from replicax.topology import Topology, best_devices
from replicax.variables import MirroredPlacement


@final
class MirroredStrategy(Strategy):
    """One replica per device, with a copy of every variable on each, kept equal.

    Args:
      devices: The devices; by default all devices of the best kind available.
      cross_device_ops: Accepted for the sake of programs written for the reference; XLA chooses how
        devices communicate.
      logical_devices_per_replica: How many consecutive devices form a replica; see
        `experimental_split_to_logical_devices` and `extended.partition`.

    >>> import replicax as rx
    >>> rx.MirroredStrategy(["CPU:0", "CPU:1"]).num_replicas_in_sync
    2
    """

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        logical_devices_per_replica: int = 1,
    ) -> None:
        require_cross_device_ops(cross_device_ops)
        super().__init__(mirrored(self, devices, logical_devices_per_replica))


def mirrored(
    strategy: Strategy,
    devices: Sequence[DeviceLike] | None,
    logical_devices_per_replica: int = 1,
) -> StrategyExtended:
    """Return the parts of a strategy with one replica per device, or per group of devices."""
    topology = Topology.of(
        best_devices() if devices is None else devices,
        logical_devices_per_replica=logical_devices_per_replica,
    )
    return StrategyExtended(strategy, topology=topology, placement=MirroredPlacement())
