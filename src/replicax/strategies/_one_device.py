"""Everything on one device."""

from __future__ import annotations

from typing import final

from replicax._typing import DeviceLike
from replicax.strategies._extended import StrategyExtended
from replicax.strategies._strategy import Strategy
from replicax.topology import Topology
from replicax.variables import OneDevicePlacement


@final
class OneDeviceStrategy(Strategy):
    """Everything on one device: to try a program before it is distributed.

    >>> import replicax as rx
    >>> strategy = rx.OneDeviceStrategy("/cpu:1")
    >>> with strategy.scope():
    ...     rx.Variable(1.0).device.id
    1
    """

    def __init__(self, device: DeviceLike) -> None:
        super().__init__(one_device(self, device))


def one_device(strategy: Strategy, device: DeviceLike) -> StrategyExtended:
    """Return the parts of a strategy on one device."""
    topology = Topology.of([device])
    return StrategyExtended(strategy, topology=topology, placement=OneDevicePlacement())
