"""One replica on each device, and all variables on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from replicax._typing import DeviceLike
from replicax.strategies._extended import StrategyExtended
from replicax.strategies._strategy import Strategy
from replicax.topology import Topology, best_devices, resolve_device
from replicax.variables import ParameterDevicePlacement


@final
class CentralStorageStrategy(Strategy):
    """One replica per device; every variable has one copy, on the parameter device.

    Args:
      compute_devices: The replicas' devices; by default all devices of the best kind available.
      parameter_device: The variables' device; by default the compute device if there is only one,
        otherwise the CPU.
    """

    def __init__(
        self,
        compute_devices: Sequence[DeviceLike] | None = None,
        parameter_device: DeviceLike | None = None,
    ) -> None:
        super().__init__(central_storage(self, compute_devices, parameter_device))


def central_storage(
    strategy: Strategy,
    compute_devices: Sequence[DeviceLike] | None,
    parameter_device: DeviceLike | None,
) -> StrategyExtended:
    """Return the parts of a strategy with one replica per device, and variables on one device."""
    topology = Topology.of(best_devices() if compute_devices is None else compute_devices)
    if parameter_device is None:
        alone = topology.num_replicas == 1
        parameter_device = topology.local_devices[0] if alone else "CPU:0"
    placement = ParameterDevicePlacement(resolve_device(parameter_device))
    return StrategyExtended(strategy, topology=topology, placement=placement)
