"""Storage: the part of a variable that keeps its arrays. The other part is its synchronization.

A *state* is an immutable value that stands for all arrays of a variable at one moment. A storage
keeps the current one, and defines what can be done with states: here, and in a program, where one
array stands for a state.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, final

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from replicax import _context
from replicax.errors import ForeignValue, InvalidArgument
from replicax.topology import REPLICA_AXIS, DeviceOrSharding, Topology
from replicax.values import Mirrored, PerReplica, place
from replicax.variables._write import Write

if TYPE_CHECKING:
    from replicax._typing import State, StrategyLike


@final
class StateLayout(enum.Enum):
    """The layout, over the replicas, of the array that represents a state in a program."""

    REPLICATED = "replicated"  # all of it on every replica
    PER_REPLICA = "per replica"  # the replicas' own arrays, one after another
    SHARDED = "sharded"  # a part of it on every replica


class Keeper(Protocol):
    """The place where another library keeps the array of one of its variables."""

    # Whether the library has the array over all devices, or only the copy of the first replica.
    has_all_copies: bool

    def get(self) -> jax.Array: ...

    def set(self, array: jax.Array) -> None: ...


class Storage(ABC):
    """The arrays of one variable.

    Args:
      name: The name of the variable, for messages.
      shape: The shape of the value that users see.
      state: The first state; None if a keeper has it, or if the workers agree on it later.
      keeper: Keeps the array in place of the storage. It is asked every time, because other code
        may have changed the array.
    """

    layout = StateLayout.REPLICATED
    # Whether the variable alone holds the memory of the stored state, which may then be reused.
    exclusive = False

    def __init__(
        self, name: str, shape: tuple[int, ...], state: State, keeper: Keeper | None = None
    ) -> None:
        self.name, self.shape = name, shape
        self._state = state
        self._keeper = keeper
        self._kept: jax.Array | None = None  # what the keeper had when `_state` was made from it
        # This makes the workers agree on the first state; None once they have.
        self._agree: Callable[[], None] | None = None

    @property
    def reusable(self) -> bool:
        """True if programs may ever reuse the memory; False if another library keeps the array."""
        return self._keeper is None

    @property
    def stored(self) -> State:
        """The state outside of any program that is being traced."""
        if self._agree is not None:
            self._agree()
        if self._keeper is not None:
            array = self._keeper.get()
            if array is not self._kept:
                self.stored = self._adopted(array)
        return self._current()

    @stored.setter
    def stored(self, state: object) -> None:
        if self._agree is not None:
            self._agree()
        self._state = state
        if self._keeper is not None:
            self._kept = self._to_keep(state, self._keeper.has_all_copies)
            self._keeper.set(self._kept)

    def await_agreement(self, agree: Callable[[], None]) -> None:
        """Register `agree` to be called before anything is read or stored; it calls `begin`."""
        self._agree = agree

    def state_of_copies(self, copies: Mirrored) -> State:
        """Return the state of a variable that has the same value on all replicas."""
        return copies

    def begin(self, state: object) -> None:
        """Store the first state."""
        self._agree = None
        self.stored = state

    def store(self, state: object) -> None:
        """Store a state, parts of which other code may hold."""
        self.stored, self.exclusive = state, False

    def settled(self, state: State) -> State:
        """Return the state to keep once `update` has written every copy."""
        return state

    def _current(self) -> State:
        return self._state

    def _adopted(self, array: jax.Array) -> State:
        """Return the state of an array that other code has given to the keeper."""
        return array

    def _to_keep(self, state: State, all_copies: bool) -> jax.Array:
        """Return the part of a state that the keeper gets."""
        return state

    # In programs.

    def spec(self, topology: Topology) -> PartitionSpec:
        """Return how the array that stands for the state is divided over the replicas."""
        return PartitionSpec()

    def sharding(self, topology: Topology) -> NamedSharding:
        """Return how that array lies on the devices of `topology`."""
        return NamedSharding(topology.mesh, self.spec(topology))

    def array_shape(self, inside: bool, topology: Topology | None) -> tuple[int, ...]:
        """Return the shape of that array, or of a replica's part of it `inside` a program."""
        return self.shape

    def own_of(self, block: jax.Array, topology: Topology) -> jax.Array:
        """Return what a replica sees, given the block that a `shard_map` passes to its code."""
        return block

    def block_of(self, own: jax.Array, topology: Topology) -> jax.Array:
        """Return the block for a replica's state; the inverse of `own_of`."""
        return own

    @abstractmethod
    def wrap(self, array: jax.Array, topology: Topology | None, inside: bool) -> State:
        """Return the state that `array` stands for in a program over `topology`."""

    @abstractmethod
    def unwrap(self, state: State, topology: Topology | None) -> jax.Array:
        """Return the array that stands for `state` in a program over `topology`."""

    @abstractmethod
    def rewrap(self, array: jax.Array, topology: Topology | None) -> State:
        """Return the state to store for an array that a program has returned."""

    def lift(self, topology: Topology | None) -> jax.Array:
        """Return the stored state as a program over `topology` takes it."""
        return self.unwrap(self.stored, topology)

    def example(self, topology: Topology | None) -> jax.Array | jax.ShapeDtypeStruct:
        """Return what has the shape and dtype of that array; only they matter."""
        return self.lift(topology)

    def store_result(self, array: jax.Array, topology: Topology | None, exclusive: bool) -> None:
        """Store the result of a program; `exclusive` if no other code holds its memory."""
        self.stored, self.exclusive = self.rewrap(array, topology), exclusive

    # Copies.

    @property
    def is_here(self) -> bool:
        """True if a copy can be read without the other workers."""
        return True

    @property
    @abstractmethod
    def num_copies(self) -> int | None:
        """The number of the local replicas' copies; None if they share a single one."""

    @abstractmethod
    def device(self, index: int) -> jax.Device:
        """Return the device of the copy of local replica `index`."""

    @abstractmethod
    def read(
        self, state: State, index: int | None, sharding: DeviceOrSharding | None = None
    ) -> jax.Array:
        """Return the copy `index` or, if that is None, the first one, moved to `sharding`."""

    @abstractmethod
    def with_copy(self, state: State, index: int, write: Write, value: Any) -> State:
        """Return a state in which a value is written to the copy `index` alone."""

    @abstractmethod
    def written(self, state: State, write: Write, value: Any) -> State:
        """Return a state in which a value, an array or Mirrored, is written to all copies."""

    def seen(self, state: State) -> State:
        """Return what users see of a state: an array, or a value with one for each replica."""
        return state

    @abstractmethod
    def whole(self, state: State) -> jax.Array:
        """Return all copies as one array, for computations that change every copy alike."""

    @abstractmethod
    def of_whole(self, array: jax.Array) -> State:
        """Return the state that the result of such a computation stands for."""


@final
class OneDevice(Storage):
    """One array on one device. The replicas share it, if there are several."""

    def __init__(
        self, name: str, shape: tuple[int, ...], state: State, keeper: Keeper | None = None
    ) -> None:
        super().__init__(name, shape, state, keeper)
        # This is noted now, because a program that is given the state may reuse its memory.
        self._noted = None if keeper is not None else _place_of(state)

    @property
    def num_copies(self) -> None:
        return None

    def device(self, index: int) -> jax.Device:
        return self._where()[0]

    def read(
        self, state: jax.Array, index: int | None, sharding: DeviceOrSharding | None = None
    ) -> jax.Array:
        stays = self._where()[1]
        return place(state, sharding) if sharding is not None and stays else state

    def with_copy(self, state: jax.Array, index: int, write: Write, value: Any) -> jax.Array:
        return self.written(state, write, value)

    def written(self, state: jax.Array, write: Write, value: Any) -> jax.Array:
        value = value.primary if isinstance(value, Mirrored) else value
        return self._here(write.applied(state, self._here(value)))

    def whole(self, state: jax.Array) -> jax.Array:
        return state

    def of_whole(self, array: jax.Array) -> jax.Array:
        return array

    def wrap(self, array: jax.Array, topology: Topology | None, inside: bool) -> jax.Array:
        return array

    def unwrap(self, state: jax.Array, topology: Topology | None) -> jax.Array:
        if topology is None or isinstance(state, Tracer):
            return state
        return topology.replicate(state)

    def rewrap(self, array: jax.Array, topology: Topology | None) -> jax.Array:
        return array if topology is None else place(array.addressable_data(0), self.device(0))

    def _here(self, value: object) -> jax.Array:
        value = jax.numpy.asarray(value)
        if isinstance(value, Tracer):
            return value
        device, stays = self._where()
        return place(value, device) if stays or value.committed else value

    def _where(self) -> tuple[jax.Device, bool]:
        """Return the device, and whether the array must stay there."""
        if self._keeper is not None:
            return _place_of(self._keeper.get())
        assert self._noted is not None
        return self._noted


def _place_of(array: jax.Array) -> tuple[jax.Device, bool]:
    return next(iter(array.devices())), array.committed


@final
class Replicated(Storage):
    """A copy on every replica's devices, all of them equal.

    Args:
      name: The name of the variable.
      shape: The shape of the value.
      state: A `Mirrored` value, or None; as for `Storage`.
      strategy: The strategy on whose devices the copies are.
      parts: How each copy is divided over the logical devices of its replica.
      keeper: As for `Storage`.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        state: Mirrored | None,
        strategy: StrategyLike,
        parts: PartitionSpec | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        super().__init__(name, shape, state, keeper)
        self._strategy, self._topology = strategy, strategy.topology
        self._parts = parts  # None if each copy is whole on each of the devices
        # After a step `_state` is the program's array, and this what was made of it for a reader:
        # making a value takes longer than all else that a step does per variable. Only `_state`
        # counts, so that no reader can bring back a value that another thread has replaced.
        self._made: Mirrored | None = None

    @property
    def num_copies(self) -> int:
        return len(self._topology.local_replicas)

    def device(self, index: int) -> jax.Device:
        return self._topology.local_devices[index]

    def read(
        self, state: Mirrored, index: int | None, sharding: DeviceOrSharding | None = None
    ) -> jax.Array:
        array = state.component(index or 0)
        return array if index is not None or sharding is None else place(array, sharding)

    def with_copy(self, state: Mirrored, index: int, write: Write, value: Any) -> Mirrored:
        sharding = self._topology.local_shardings[index]
        value = value.component(index) if isinstance(value, Mirrored) else value
        new = write.applied(state.component(index), place(value, sharding))
        # In a program nothing is moved: XLA gets the layout of the results.
        if isinstance(sharding, NamedSharding) and _context.current().program is None:
            new = jax.device_put(new, self._topology.local_shardings_by(self._spec_of_parts)[index])
        return state.replaced(index, new)

    def written(self, state: Mirrored, write: Write, value: Any) -> Mirrored:
        if self._is_laid_out_here():
            value = value.primary if isinstance(value, Mirrored) else value
            everywhere = self._topology.lay_out(value, self._spec_of_parts)
        else:
            everywhere = self._strategy.collectives.mirror(value).array(self._topology)
        return self.of_whole(write.applied(self.whole(state), everywhere))

    def whole(self, state: Mirrored) -> jax.Array:
        return state.array(self._topology)

    def of_whole(self, array: jax.Array) -> Mirrored:
        if self._is_laid_out_here():
            array = self._topology.lay_out(array, self._spec_of_parts)
        return self._strategy.collectives.as_mirrored(array)

    def sharding(self, topology: Topology) -> NamedSharding:
        own = topology == self._topology
        return NamedSharding(topology.mesh, self._spec_of_parts) if own else topology.replicated

    def wrap(self, array: jax.Array, topology: Topology | None, inside: bool) -> Mirrored:
        return Mirrored.from_array(array, topology or self._topology, inside=inside)

    def unwrap(self, state: Mirrored, topology: Topology | None) -> jax.Array:
        if topology is None or topology == self._topology:
            return state.array(self._topology)
        return topology.replicate(state.primary)

    def rewrap(self, array: jax.Array, topology: Topology | None) -> Mirrored:
        own = self._topology
        if topology is None or topology is own or topology == own:
            return Mirrored.from_array(array, own)
        array = own.replicate(array.addressable_data(0))
        return Mirrored.from_array(own.lay_out(array, self._spec_of_parts), own)

    def lift(self, topology: Topology | None) -> jax.Array:
        state = self._state
        if topology is self._topology and type(state) is not Mirrored and state is not None:
            return state  # fast path: taken on every step after the first
        return self.unwrap(self.stored, topology)

    def store_result(self, array: jax.Array, topology: Topology | None, exclusive: bool) -> None:
        if topology is self._topology and self._keeper is None:  # fast path, as above
            self._state, self._made, self.exclusive = array, None, exclusive
        else:
            super().store_result(array, topology, exclusive)

    def _current(self) -> Mirrored:
        state = self._state
        if type(state) is Mirrored:
            return state
        made = self._made
        if made is None or made.whole is not state:
            made = self._made = Mirrored.from_array(state, self._topology)
        return made

    def _adopted(self, array: jax.Array) -> Mirrored:
        return Mirrored.from_array(self._topology.replicate(array), self._topology)

    def _to_keep(self, state: Mirrored, all_copies: bool) -> jax.Array:
        if all_copies:
            return state.array(self._topology)
        array = state.whole
        if array is None or self._topology.logical_devices_per_replica > 1:
            return state.primary
        return array.addressable_data(0)

    @property
    def _spec_of_parts(self) -> PartitionSpec:
        return self._parts or PartitionSpec()

    def _is_laid_out_here(self) -> bool:
        return self._parts is not None and _context.current().program is None


@final
class OwnCopies(Storage):
    """A copy on every replica's devices, each independent of the others."""

    layout = StateLayout.PER_REPLICA

    def __init__(
        self, name: str, shape: tuple[int, ...], state: PerReplica | None, strategy: StrategyLike
    ) -> None:
        super().__init__(name, shape, state)
        self._strategy, self._topology = strategy, strategy.topology

    @property
    def num_copies(self) -> int:
        return len(self._topology.local_replicas)

    def device(self, index: int) -> jax.Device:
        return self._topology.local_devices[index]

    def read(
        self, state: PerReplica, index: int | None, sharding: DeviceOrSharding | None = None
    ) -> jax.Array:
        array = state.component(index or 0)
        return array if index is not None or sharding is None else place(array, sharding)

    def with_copy(self, state: PerReplica, index: int, write: Write, value: Any) -> PerReplica:
        value = value.component(index) if isinstance(value, Mirrored) else value
        placed = place(value, self._topology.local_shardings[index])
        return state.replaced(index, write.applied(state.component(index), placed))

    def of_copies(self, values: Sequence[jax.Array]) -> PerReplica:
        """Return the state in which every replica, including other workers', has its value."""
        return self._strategy.collectives.distribute(values)

    def written(self, state: PerReplica, write: Write, value: Any) -> NoReturn:
        self.whole(state)

    def whole(self, state: PerReplica) -> NoReturn:
        raise InvalidArgument(
            f"The ON_READ variable {self.name!r} has copies that differ and cannot be trained. "
            "Create it without `synchronization=ON_READ`."
        )

    def of_whole(self, array: jax.Array) -> NoReturn:
        self.whole(self.stored)

    def spec(self, topology: Topology) -> PartitionSpec:
        return PartitionSpec(REPLICA_AXIS)

    def array_shape(self, inside: bool, topology: Topology | None) -> tuple[int, ...]:
        if inside:
            return self.shape
        replicas = self._topology.num_replicas
        return (replicas * self.shape[0], *self.shape[1:]) if self.shape else (replicas,)

    def own_of(self, block: jax.Array, topology: Topology) -> jax.Array:
        return block if self.shape else block[0]

    def block_of(self, own: jax.Array, topology: Topology) -> jax.Array:
        return own if self.shape else own[None]

    def wrap(self, array: jax.Array, topology: Topology | None, inside: bool) -> PerReplica:
        return PerReplica.from_array(array, self._topology, scalars=not self.shape, inside=inside)

    def unwrap(self, state: PerReplica, topology: Topology | None) -> jax.Array:
        if topology is not None and topology != self._topology:
            raise ForeignValue(
                f"The ON_READ variable {self.name!r} belongs to {self._strategy!r} and cannot be "
                f"used in a program on {topology}. Read it before, and pass the value."
            )
        return state.array(self._topology)

    def rewrap(self, array: jax.Array, topology: Topology | None) -> PerReplica:
        return self.wrap(array, topology, inside=False)
