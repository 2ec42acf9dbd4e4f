"""A variable with one copy, on one device, under one replica or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer

from replicax._context import Frame, Kind
from replicax.errors import ContextError
from replicax.values import place
from replicax.variables._creation import VariableRequest
from replicax.variables._variable import Combine, Variable

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


class PlainVariable(Variable):
    """What `rx.Variable` makes outside every scope, and under strategies with one device."""

    _device: jax.Device
    _committed: bool

    @classmethod
    def create(
        cls, request: VariableRequest, strategy: StrategyLike | None, device: jax.Device | None
    ) -> PlainVariable:
        array = request.initial_array()
        variable = cls._build(
            request, strategy, array if device is None else place(array, device), array
        )
        # Kept, because a program that is given the state may reuse its memory.
        variable._device = next(iter(variable._stored.devices()))
        variable._committed = variable._stored.committed
        return variable

    @property
    def values(self) -> tuple[Variable, ...]:
        return (self,)

    @property
    def device(self) -> jax.Device:
        return self._device

    @property
    def _pinned(self) -> bool:
        """Whether it is to stay on its device."""
        return self._committed

    def _read(self, frame: Frame) -> jax.Array:
        if frame.replica is not None and self._pinned:
            return place(self.state, frame.replica.home)
        return self.state

    def _write(self, frame: Frame, combine: Combine, value: Any) -> None:
        self._settle(frame, combine(self.state, self._here(self._agreed(frame, value))))

    def _agreed(self, frame: Frame, value: jax.Array) -> jax.Array:
        if frame.kind is Kind.REPLICA and frame.replica and frame.replica.num_replicas_in_sync > 1:
            raise ContextError(
                f"Variable {self.name!r} has one copy and cannot be written by "
                f"{frame.replica.num_replicas_in_sync} replicas. Current context: {frame}. Create "
                "it in `strategy.scope()` with an `aggregation`, or write it outside `run`."
            )
        return value

    def _settle(self, frame: Frame, value: jax.Array) -> None:
        self.set_state(self._here(value))

    def _here(self, value: Any) -> jax.Array:
        value = jax.numpy.asarray(value)
        if isinstance(value, Tracer):
            return value
        return place(value, self.device) if self._pinned or value.committed else value

    def cross_replica_array(self) -> jax.Array:
        return self.state

    def store_cross_replica_array(self, array: jax.Array) -> None:
        self.set_state(array)

    def __repr__(self) -> str:
        return describe(self.name, self.state)


def describe(name: str, array: jax.Array) -> str:
    """One line for one copy."""
    if isinstance(array, Tracer):
        return f"<rx.Variable {name!r} shape={array.shape} dtype={array.dtype}, traced>"
    with np.printoptions(threshold=8, edgeitems=2):
        value = str(np.asarray(array)).replace("\n", "")
    return f"<rx.Variable {name!r} shape={array.shape} dtype={array.dtype}, value={value}>"
