"""A variable with an equal copy on every replica's device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from replicax import _context
from replicax._context import Frame
from replicax.errors import ContextError
from replicax.values import Mirrored, place
from replicax.variables._copy import VariableWithCopies
from replicax.variables._creation import VariableRequest
from replicax.variables._initial import from_first_worker, in_parts, layout_of
from replicax.variables._on_write import SyncOnWriteVariable
from replicax.variables._variable import Combine

if TYPE_CHECKING:
    from replicax._typing import StrategyLike
    from replicax.topology import Topology


class MirroredVariable(SyncOnWriteVariable, VariableWithCopies):
    """Copies that are written together and are always equal."""

    _spec = PartitionSpec()  # how each copy is divided over the logical devices of its replica

    @classmethod
    def create(
        cls, request: VariableRequest, strategy: StrategyLike, colocate_with: Any
    ) -> MirroredVariable:
        if request.partition is not None:
            return cls._divided(request, strategy)
        array = request.initial_array()
        request, _ = layout_of(request, strategy.topology, array.shape, colocate_with)
        if request.partition is not None:
            return cls._divided(replace(request, initial_value=array), strategy)
        return cls._build(request, strategy, from_first_worker(strategy, request, array), array)

    @classmethod
    def _divided(cls, request: VariableRequest, strategy: StrategyLike) -> MirroredVariable:
        return cls.of_array(request, strategy, in_parts(strategy, request)[0])

    @classmethod
    def of_array(
        cls, request: VariableRequest, strategy: StrategyLike, array: Any
    ) -> MirroredVariable:
        """Of what stands for all copies, laid out as is asked for."""
        request, spec = layout_of(request, strategy.topology, array.shape)
        state = Mirrored.from_array(array, strategy.topology)
        variable = cls._build(request, strategy, state, array)
        variable._spec = spec
        return variable

    @property
    def device(self) -> jax.Device:
        frame = _context.current()
        index = frame.copy if self._in_update(frame) else 0
        if self._in_replica(frame) and frame.replica is not None:
            index = frame.replica.local_index
        return self._home.topology.local_devices[index or 0]

    def read_copy(self, index: int) -> jax.Array:
        return self.state.component(index)

    def write_copy(self, frame: Frame, index: int, combine: Combine, value: Any) -> None:
        if not self._in_update(frame) or frame.copy != index:
            raise ContextError(
                f"One copy of the mirrored variable {self.name!r} was written, which would make "
                f"its copies differ. Current context: {frame}. Assign to the variable itself, or "
                "use `strategy.extended.update(variable, fn)`."
            )
        home = self._home.topology.local_homes[index]
        new = combine(self.read_copy(index), place(value, home))
        # In a program nothing is moved: it is told how to lay out what it returns.
        several = isinstance(home, NamedSharding)
        if several and frame.program is None:
            new = jax.device_put(new, self._home.topology.divided_homes(self._spec)[index])
        self.set_state(self.state.replaced(index, new))

    def _read(self, frame: Frame) -> jax.Array:
        if self._in_replica(frame):
            assert frame.replica is not None
            return self.read_copy(frame.replica.local_index)
        if self._in_update(frame):
            assert frame.copy is not None
            return self.read_copy(frame.copy)
        if frame.replica is not None:  # a replica of another strategy
            return place(self.read_copy(0), frame.replica.home)
        return self.read_copy(0)

    def _write_agreed(self, frame: Frame, combine: Combine, value: Any) -> None:
        if self._in_update(frame):
            assert frame.copy is not None
            value = value.component(frame.copy) if isinstance(value, Mirrored) else value
            self.write_copy(frame, frame.copy, combine, value)
        else:
            topology = self._home.topology
            if self.partition is not None and frame.program is None:
                whole = value.primary if isinstance(value, Mirrored) else value
                everywhere = topology.lay_out(whole, self._spec)
            else:
                everywhere = self._home.collectives.mirror(value).array(topology)
            self.store_cross_replica_array(combine(self.cross_replica_array(), everywhere))

    def cross_replica_array(self) -> jax.Array:
        return self.state.array(self._home.topology)

    def store_cross_replica_array(self, array: jax.Array) -> None:
        if self.partition is not None and _context.current().program is None:
            array = self._home.topology.lay_out(array, self._spec)
        self.set_state(self._home.collectives.as_mirrored(array))

    def lift(self, topology: Topology | None) -> jax.Array:
        whole = self._stored.whole
        if whole is not None and topology is self._stored.topology:
            return whole  # the way of every step; the rest is for the first
        return self.unwrap_state(self._stored, topology)

    def settle_program(self, array: jax.Array, topology: Topology | None, exclusive: bool) -> None:
        stored = self._stored
        if topology is stored.topology:  # as above
            self._stored, self.exclusive = stored.with_array(array), exclusive
        else:
            super().settle_program(array, topology, exclusive)

    def layout(self, topology: Topology) -> NamedSharding:
        own = topology == self._home.topology
        return NamedSharding(topology.mesh, self._spec) if own else topology.replicated

    def wrap_state(self, array: jax.Array, topology: Topology | None, inside: bool) -> Mirrored:
        return Mirrored.from_array(array, topology or self._home.topology, inside=inside)

    def unwrap_state(self, state: Mirrored, topology: Topology | None) -> jax.Array:
        if topology is None or topology == self._home.topology:
            return state.array(self._home.topology)
        return topology.replicate(state.primary)

    def rewrap_state(self, array: jax.Array, topology: Topology | None) -> Mirrored:
        home = self._home.topology
        if topology is None or topology is home or topology == home:
            return Mirrored.from_array(array, home)
        array = home.replicate(array.addressable_data(0))
        return Mirrored.from_array(home.lay_out(array, self._spec), home)
