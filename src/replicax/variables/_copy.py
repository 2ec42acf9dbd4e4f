"""One replica's copy of a variable, as `variable.values` and `update` give it."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any, final

import jax

from replicax._context import Frame
from replicax.values import Component
from replicax.variables._plain import describe
from replicax.variables._variable import Combine, Variable


class VariableWithCopies(Variable):
    """A variable with a copy for each local replica, which can be read and written one by one."""

    _copies: tuple[VariableCopy, ...] | None = None

    @property
    def values(self) -> tuple[Variable, ...]:
        if self._copies is None:
            count = len(self._home.topology.local_replicas)
            self._copies = tuple(VariableCopy.of(self, index) for index in range(count))
        return self._copies

    @abstractmethod
    def read_copy(self, index: int) -> jax.Array:
        """The value of one copy."""

    @abstractmethod
    def write_copy(self, frame: Frame, index: int, combine: Combine, value: Any) -> None:
        """Changes one copy, where the rules of `frame` allow it."""


@final
class VariableCopy(Component, Variable):
    """A variable that is part of another; knows its container."""

    _container: VariableWithCopies
    _index: int

    @classmethod
    def of(cls, container: VariableWithCopies, index: int) -> VariableCopy:
        self = object.__new__(cls)
        self._container, self._index = container, index
        self._strategy, self._request = container._strategy, container._request
        self._shape, self._dtype = container._shape, container._dtype
        return self

    @property
    def container(self) -> Variable:
        return self._container

    @property
    def name(self) -> str:
        name = self._container.name
        return name if self._index == 0 else f"{name}/replica_{self._index}"

    @property
    def values(self) -> tuple[Variable, ...]:
        return (self,)

    @property
    def device(self) -> jax.Device:
        return self._container._home.topology.local_devices[self._index]

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        return copy.deepcopy(self._container, memo).values[self._index]

    def _read(self, frame: Frame) -> jax.Array:
        own = frame.replica is not None and frame.replica.local_index == self._index
        if frame.overlay is not None and own and self._in_replica(frame):
            return self._container.value  # which a differentiated function may see otherwise
        return self._container.read_copy(self._index)

    def _write(self, frame: Frame, combine: Combine, value: Any) -> None:
        self._container.write_copy(frame, self._index, combine, value)

    def _agreed(self, frame: Frame, value: jax.Array) -> jax.Array:
        return value

    def _settle(self, frame: Frame, value: jax.Array) -> None:
        self._write(frame, lambda old, new: new, value)

    def cross_replica_array(self) -> jax.Array:
        return self._container.cross_replica_array()

    def store_cross_replica_array(self, array: jax.Array) -> None:
        self._container.store_cross_replica_array(array)

    def __repr__(self) -> str:
        return describe(self.name, self._container.read_copy(self._index))
