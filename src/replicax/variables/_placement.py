"""Which kind of variable a strategy makes, and where: one of the parts of a strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import jax

from replicax._enums import VariableSynchronization
from replicax.errors import InvalidArgument
from replicax.topology import Topology
from replicax.variables._aggregating import AggregatingVariable
from replicax.variables._computed_at_once import computed_at_once
from replicax.variables._creation import VariableRequest
from replicax.variables._mirrored import MirroredVariable
from replicax.variables._plain import PlainVariable
from replicax.variables._sync_on_read import SyncOnReadVariable
from replicax.variables._variable import Variable

if TYPE_CHECKING:
    from replicax._typing import Nest, StrategyLike


class VariablePlacement(ABC):
    """Makes the variables of a strategy."""

    @abstractmethod
    def create(
        self, request: VariableRequest, strategy: StrategyLike, colocate_with: Any
    ) -> Variable:
        """Makes a variable; on the devices of `colocate_with`, where that is a choice."""

    @abstractmethod
    def devices(self, topology: Topology) -> tuple[jax.Device, ...]:
        """The local devices that hold variables."""

    def initial(self, make: Callable[..., Nest], *variables: Variable) -> Nest:
        """Return what variables begin with: `make` of the values of others, also while tracing."""
        with jax.ensure_compile_time_eval():
            if not variables:
                return make()
            values = [variable.stored_value() for variable in variables]
        return computed_at_once(make, values)


@final
class MirroredPlacement(VariablePlacement):
    """A copy on every replica's device. All variables are on all devices, so all are colocated."""

    def create(
        self, request: VariableRequest, strategy: StrategyLike, colocate_with: Any
    ) -> Variable:
        if request.synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable.create(request, strategy)
        return MirroredVariable.create(request, strategy, colocate_with)

    def devices(self, topology: Topology) -> tuple[jax.Device, ...]:
        return topology.local_devices


@final
class ParameterDevicePlacement(VariablePlacement):
    """One copy on one device that all replicas share; ON_READ variables are with the replicas."""

    def __init__(self, device: jax.Device) -> None:
        self._device = device

    def create(
        self, request: VariableRequest, strategy: StrategyLike, colocate_with: Any
    ) -> Variable:
        _require_one_device(strategy)
        if request.synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable.create(request, strategy)
        return AggregatingVariable.create(request, strategy, self._device)

    def devices(self, topology: Topology) -> tuple[jax.Device, ...]:
        return (self._device,)


@final
class OneDevicePlacement(VariablePlacement):
    """Plain variables on the only device there is: nothing to keep in sync."""

    def create(
        self, request: VariableRequest, strategy: StrategyLike, colocate_with: Any
    ) -> Variable:
        _require_one_device(strategy)
        return PlainVariable.create(request, strategy, strategy.topology.local_devices[0])

    def devices(self, topology: Topology) -> tuple[jax.Device, ...]:
        return topology.local_devices


def _require_one_device(strategy: StrategyLike) -> None:
    if strategy.topology.logical_devices_per_replica > 1:
        raise InvalidArgument(
            f"Variables with one copy are for replicas of one device; got {strategy.topology}. Use "
            "`rx.parts.MirroredPlacement()`."
        )
