"""A variable with one copy, on a parameter device, that several replicas share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import jax

from replicax._context import Frame
from replicax.values import Mirrored, place
from replicax.variables._creation import VariableRequest
from replicax.variables._on_write import SyncOnWriteVariable
from replicax.variables._plain import describe
from replicax.variables._variable import Combine, Variable

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


@final
class AggregatingVariable(SyncOnWriteVariable):
    """What replicas write is combined first; each of them reads a copy on its own device."""

    _device: jax.Device

    @classmethod
    def create(
        cls, request: VariableRequest, strategy: StrategyLike, device: jax.Device
    ) -> AggregatingVariable:
        array = request.initial_array()
        variable = cls._build(request, strategy, jax.device_put(array, device), array)
        variable._device = device
        return variable

    @property
    def values(self) -> tuple[Variable, ...]:
        return (self,)

    @property
    def device(self) -> jax.Device:
        return self._device

    def _read(self, frame: Frame) -> jax.Array:
        if frame.replica is not None:
            return place(self.state, frame.replica.home)
        return self.state

    def _write_agreed(self, frame: Frame, combine: Combine, value: Any) -> None:
        array = value.primary if isinstance(value, Mirrored) else value
        self.set_state(combine(self.state, place(array, self.device)))

    def cross_replica_array(self) -> jax.Array:
        return self.state

    def store_cross_replica_array(self, array: jax.Array) -> None:
        self.set_state(array)

    def __repr__(self) -> str:
        return f"AggregatingVariable:{{\n  0: {describe(self.name, self.state)}\n}}"
