"""The kinds of variables that strategies make: each a storage and a synchronization with a name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, final

import jax

from replicax.values import Mirrored, PerReplica, place
from replicax.variables._creation import VariableRequest
from replicax.variables._divided_storage import Divided, DividedState
from replicax.variables._division import Division
from replicax.variables._initial import begin_alike, in_parts, layout_of
from replicax.variables._state import state_of
from replicax.variables._storage import OneDevice, OwnCopies, Replicated
from replicax.variables._synchronization import OnRead, OnWrite, Unsynchronized
from replicax.variables._variable import Variable, describe

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

ON_WRITE = OnWrite()
_ON_READ = OnRead()
UNSYNCHRONIZED = Unsynchronized()


@final
class PlainVariable(Variable):
    """A variable with one copy, as created outside of every scope and on one device."""

    @classmethod
    def create(
        cls, request: VariableRequest, strategy: StrategyLike | None, device: jax.Device | None
    ) -> PlainVariable:
        """Create a variable on `device`, or wherever JAX puts it."""
        array = request.initial_array()
        array = array if device is None else place(array, device)
        storage = OneDevice(request.name, array.shape, array)
        return cls._made(request, strategy, storage, UNSYNCHRONIZED, array.dtype)

    def __repr__(self) -> str:
        return describe(self.name, state_of(self))


@final
class AggregatingVariable(Variable):
    """One copy on a parameter device. The replicas' writes to it are combined first."""

    @classmethod
    def create(
        cls, request: VariableRequest, strategy: StrategyLike, device: jax.Device
    ) -> AggregatingVariable:
        """Create a variable on `device`."""
        array = jax.device_put(request.initial_array(), device)
        storage = OneDevice(request.name, array.shape, array)
        return cls._made(request, strategy, storage, ON_WRITE, array.dtype)


@final
class MirroredVariable(Variable):
    """A copy on every replica's devices. Copies are written together and are always equal."""

    @classmethod
    def create(
        cls, request: VariableRequest, strategy: StrategyLike, colocate_with: object
    ) -> MirroredVariable:
        """Create a variable that starts alike on all workers, divided like `colocate_with`."""
        if request.partition is not None:
            return cls._divided(request, strategy)
        array = request.initial_array()
        request, _ = layout_of(request, strategy.topology, array.shape, colocate_with)
        if request.partition is not None:
            return cls._divided(replace(request, initial_value=array), strategy)
        storage = Replicated(request.name, array.shape, None, strategy)
        begin_alike(storage, strategy.topology, array, storage.state_of_copies)
        return cls._made(request, strategy, storage, ON_WRITE, array.dtype)

    @classmethod
    def create_divided(
        cls,
        request: VariableRequest,
        strategy: StrategyLike,
        array: jax.Array,
        division: Division,
        regather: bool,
    ) -> MirroredVariable:
        """Create a variable that is divided over replicas; programs cannot tell the difference."""
        _, logical = layout_of(request, strategy.topology, array.shape)
        storage = Divided(
            request.name, array.shape, strategy, division, regather, logical=logical or None
        )
        begin_alike(storage, strategy.topology, array, storage.state_of_copies)
        return cls._made(request, strategy, storage, ON_WRITE, array.dtype)

    @classmethod
    def of_parts(
        cls,
        request: VariableRequest,
        strategy: StrategyLike,
        shape: tuple[int, ...],
        parts: jax.Array,
        division: Division,
        regather: bool,
    ) -> MirroredVariable:
        """Create a divided variable from the array of all its parts."""
        storage = Divided(request.name, shape, strategy, division, regather)
        storage.begin(DividedState(parts=parts))
        return cls._made(request, strategy, storage, ON_WRITE, parts.dtype)

    @classmethod
    def of_array(
        cls, request: VariableRequest, strategy: StrategyLike, array: jax.Array
    ) -> MirroredVariable:
        """Create a variable from the array that stands for all copies, in the requested layout."""
        request, spec = layout_of(request, strategy.topology, array.shape)
        state = Mirrored.from_array(array, strategy.topology)
        parts = None if request.partition is None else spec
        storage = Replicated(request.name, array.shape, state, strategy, parts)
        return cls._made(request, strategy, storage, ON_WRITE, array.dtype)

    @classmethod
    def _divided(cls, request: VariableRequest, strategy: StrategyLike) -> MirroredVariable:
        return cls.of_array(request, strategy, in_parts(strategy, request)[0])


@final
class SyncOnReadVariable(Variable):
    """A variable with `synchronization=ON_READ`: replicas read and write their copy for free."""

    @classmethod
    def create(cls, request: VariableRequest, strategy: StrategyLike) -> SyncOnReadVariable:
        """Create a variable whose copies start alike."""
        array = request.initial_array()
        topology = strategy.topology

        def state_of(value: Mirrored) -> PerReplica:
            shapes = [array.shape] * topology.num_replicas
            return PerReplica(value.values, topology, shapes=shapes)

        storage = OwnCopies(request.name, array.shape, None, strategy)
        begin_alike(storage, topology, array, state_of)
        return cls._made(request, strategy, storage, _ON_READ, array.dtype)

    @classmethod
    def of_state(
        cls,
        request: VariableRequest,
        strategy: StrategyLike,
        shape: tuple[int, ...],
        dtype: object,
        state: PerReplica,
    ) -> SyncOnReadVariable:
        """Create a variable from the replicas' values."""
        storage = OwnCopies(request.name, shape, state, strategy)
        return cls._made(request, strategy, storage, _ON_READ, dtype)
