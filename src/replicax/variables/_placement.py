"""The choice of the kind of variables, and of their devices: one of a strategy's parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, final

import jax
from jax.sharding import NamedSharding, PartitionSpec

from replicax._enums import VariableSynchronization
from replicax.errors import InvalidArgument
from replicax.topology import Topology
from replicax.variables._computed_at_once import computed_at_once
from replicax.variables._creation import VariableRequest
from replicax.variables._divided_storage import Divided
from replicax.variables._division import Division, VariablePartitioner, division_of
from replicax.variables._initial import layout_of
from replicax.variables._kinds import (
    AggregatingVariable,
    MirroredVariable,
    PlainVariable,
    SyncOnReadVariable,
)
from replicax.variables._storage import Keeper, Replicated, Storage
from replicax.variables._variable import Variable, storage_of, stored_value

if TYPE_CHECKING:
    from replicax._typing import Nest, StrategyLike


class VariablePlacement(ABC):
    """The part of a strategy that makes its variables."""

    # Whether it divides variables over the replicas, so that whole ones may be an oversight.
    divides = False
    # Whether updates are computed where the variables are, by `send_update`.
    sends_updates = False

    @abstractmethod
    def create(
        self, request: VariableRequest, strategy: StrategyLike, colocate_with: object
    ) -> Variable:
        """Make a variable, on the devices of `colocate_with` if there is a choice."""

    @abstractmethod
    def devices(self, topology: Topology) -> tuple[jax.Device, ...]:
        """Return the local devices that hold variables."""

    def storage_of_kept(
        self, name: str, strategy: StrategyLike, array: jax.Array, keeper: Keeper
    ) -> Storage:
        """Return the storage of a variable whose array another library keeps."""
        return Replicated(name, array.shape, None, strategy, keeper=keeper)

    def layout_of_kept(self, array: jax.Array, topology: Topology) -> NamedSharding:
        """Return the layout over the devices of an array that another library keeps."""
        return topology.replicated

    def send_update(
        self,
        variables: Sequence[Variable],
        function: Callable[[list[jax.Array], list[jax.Array]], list[jax.Array]],
        operands: Sequence[jax.Array],
        owners: Sequence[Variable | None],
    ) -> None:
        """Have variables updated where they are, if the placement `sends_updates`.

        Args:
          variables: The variables.
          function: From their values and the operands to their new values.
          operands: The operands.
          owners: For each, the variable whose shape it has, as a gradient does; or None.
        """
        raise NotImplementedError

    def initial(self, make: Callable[..., Nest], *variables: Variable) -> Nest:
        """Return initial values: `make` applied to other variables' values, even while tracing."""
        with jax.ensure_compile_time_eval():
            if not variables:
                return make()
            values = [stored_value(variable) for variable in variables]
        return computed_at_once(make, values)


@final
class MirroredPlacement(VariablePlacement):
    """A copy on every replica's device. All variables are on all devices, so all are colocated."""

    def create(
        self, request: VariableRequest, strategy: StrategyLike, colocate_with: object
    ) -> Variable:
        if request.synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable.create(request, strategy)
        return MirroredVariable.create(request, strategy, colocate_with)

    def devices(self, topology: Topology) -> tuple[jax.Device, ...]:
        return topology.local_devices


@final
class ShardedPlacement(VariablePlacement):
    """A part of every large variable on each replica's device; small ones are mirrored.

    Args:
      partitioner: A function of a shape and a dtype that returns the number of parts for each
        dimension: the one with more than one part is divided over the replicas. By default a
        variable of at least 64 KiB is divided, along its largest dimension that divides evenly.
      regather: Whether programs gather variables again for the backward pass.
    """

    divides = True
    # Gradients of divided variables are sent separately, so that each replica gets only its part.
    bytes_per_pack = 64 * 1024 - 1

    def __init__(
        self, partitioner: VariablePartitioner | None = None, *, regather: bool = True
    ) -> None:
        self._partitioner, self.regather = partitioner, regather

    def create(
        self, request: VariableRequest, strategy: StrategyLike, colocate_with: object
    ) -> Variable:
        if request.synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable.create(request, strategy)
        array, topology = request.initial_array(), strategy.topology
        request, _ = layout_of(request, topology, array.shape, colocate_with)
        request = replace(request, initial_value=array)
        division = self.division(array, topology, colocate_with, request.partition)
        if division is None:
            return MirroredVariable.create(request, strategy, colocate_with)
        return MirroredVariable.create_divided(request, strategy, array, division, self.regather)

    def devices(self, topology: Topology) -> tuple[jax.Device, ...]:
        return topology.local_devices

    def storage_of_kept(
        self, name: str, strategy: StrategyLike, array: jax.Array, keeper: Keeper
    ) -> Storage:
        division = self._division_of_kept(array, strategy.topology)
        if division is None:
            return super().storage_of_kept(name, strategy, array, keeper)
        return Divided(name, array.shape, strategy, division, self.regather, keeper)

    def layout_of_kept(self, array: jax.Array, topology: Topology) -> NamedSharding:
        division = self._division_of_kept(array, topology)
        spec = PartitionSpec() if division is None else division.spec
        return NamedSharding(topology.mesh, spec)

    def _division_of_kept(self, array: jax.Array, topology: Topology) -> Division | None:
        # The library reads the array itself, so all of it must be here, and without padding.
        division = None if topology.spans_processes else self.division(array, topology, None)
        return None if division is None or division.padding else division

    def division(
        self,
        array: jax.Array | jax.ShapeDtypeStruct,
        topology: Topology,
        colocate_with: object,
        logical: tuple[int, ...] | None = None,
    ) -> Division | None:
        """Return how a variable is divided: a slot like its variable, whatever its dtype."""
        if isinstance(colocate_with, Variable) and colocate_with.shape == array.shape:
            beside = storage_of(colocate_with)
            return beside.division if isinstance(beside, Divided) else None
        parts = topology.num_replicas
        return division_of(array.shape, array.dtype, parts, self._partitioner, logical)


@final
class ParameterDevicePlacement(VariablePlacement):
    """One copy on one device that all replicas share; ON_READ variables live with the replicas."""

    def __init__(self, device: jax.Device) -> None:
        self._device = device

    def create(
        self, request: VariableRequest, strategy: StrategyLike, colocate_with: object
    ) -> Variable:
        _require_one_device(strategy)
        if request.synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable.create(request, strategy)
        return AggregatingVariable.create(request, strategy, self._device)

    def devices(self, topology: Topology) -> tuple[jax.Device, ...]:
        return (self._device,)


@final
class OneDevicePlacement(VariablePlacement):
    """Plain variables on the only device there is, with nothing to keep in sync."""

    def create(
        self, request: VariableRequest, strategy: StrategyLike, colocate_with: object
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
