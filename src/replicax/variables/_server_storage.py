"""Variables on parameter servers: their storage, and what reads and writes of them mean."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _context
from replicax._context import ContextKind, Frame
from replicax.errors import ContextError, InvalidArgument
from replicax.parameter_server import Servers, WriteTo
from replicax.topology import DeviceOrSharding, Topology
from replicax.values import Mirrored
from replicax.variables._creation import VariableRequest
from replicax.variables._state import set_state, state_of
from replicax.variables._storage import Storage
from replicax.variables._synchronization import Synchronization
from replicax.variables._variable import Variable
from replicax.variables._write import Write

if TYPE_CHECKING:
    from replicax._typing import State, StrategyLike


@final
@dataclass(frozen=True, slots=True, weakref_slot=True)
class Piece:
    """Consecutive rows of a variable, or all of it, in an array on a server.

    Args:
      server: The index of the server.
      number: The number of the array there.
      rows: The rows; None if it is the whole variable.
    """

    server: int
    number: int
    rows: slice | None = None

    @classmethod
    def create(
        cls, servers: Servers, server: int, value: np.ndarray, rows: slice | None = None
    ) -> Piece:
        """Put a value on a server, for as long as something refers to the piece."""
        piece = cls(server, servers.create(server, value), rows)
        weakref.finalize(piece, servers.forget, server, piece.number).atexit = False
        return piece

    @property
    def place(self) -> tuple[int, int]:
        """The server, and the number of the array there."""
        return self.server, self.number

    def of(self, value: np.ndarray) -> np.ndarray:
        """Return the rows that belong here."""
        return value if self.rows is None else value[self.rows]


@final
@dataclass(frozen=True, slots=True)
class Part:
    """A piece, seen as the whole of a variable."""

    piece: Piece
    rows: None = None

    @property
    def server(self) -> int:
        return self.piece.server

    @property
    def number(self) -> int:
        return self.piece.number

    @property
    def place(self) -> tuple[int, int]:
        return self.piece.place

    def of(self, value: np.ndarray) -> np.ndarray:
        return value


@final
@dataclass(frozen=True, slots=True)
class ServerDevice:
    """The name of the device of a parameter server, as the reference writes it."""

    index: int

    def __str__(self) -> str:
        return f"/job:ps/replica:0/task:{self.index}/device:CPU:0"


@final
class OnServers(Storage):
    """Arrays on parameter servers. This process has no copy: every read asks for the value.

    Args:
      name: The name of the variable.
      shape: The shape of the value.
      dtype: Its dtype.
      servers: The servers.
      pieces: The arrays, in the order of their rows.
      device: Where values are that are read in this process.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        servers: Servers,
        pieces: Sequence[Piece | Part],
        device: jax.Device,
    ) -> None:
        super().__init__(name, shape, None)
        self.pieces, self._servers = tuple(pieces), servers
        self._dtype, self._device = dtype, device

    @property
    def stored(self) -> State:
        """The value, which is on the servers."""
        values = self._servers.read(piece.place for piece in self.pieces)
        return jax.device_put(joined([values[each.place] for each in self.pieces]), self._device)

    @stored.setter
    def stored(self, state: Any) -> None:
        self.push(Write.ASSIGN, state)

    def push(self, write: Write, value: Any) -> None:
        """Have the servers write a value."""
        array = np.asarray(value, self._dtype)
        changes: dict[int, list[WriteTo]] = {}
        for piece in self.pieces:
            one = WriteTo(piece.number, write.value, piece.of(array))
            changes.setdefault(piece.server, []).append(one)
        self._servers.apply(changes)

    def part(self, name: str, shape: tuple[int, ...], index: int) -> OnServers:
        """Return the storage of one of the pieces, which stays where it is."""
        # `Piece.of` is for the whole variable, so the part has a piece of its own, which keeps the
        # other one alive.
        piece = Part(self.pieces[index])
        return OnServers(name, shape, self._dtype, self._servers, [piece], self._device)

    def example(self, topology: Topology | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self._dtype)

    def store_result(self, array: jax.Array, topology: Topology | None, exclusive: bool) -> None:
        raise AssertionError(f"a program has written {self.name!r}, which `OnServer` refuses")

    @property
    def num_copies(self) -> None:
        return None

    def device(self, index: int) -> jax.Device:
        return self._device

    def read(
        self, state: jax.Array, index: int | None, sharding: DeviceOrSharding | None = None
    ) -> jax.Array:
        return state

    def with_copy(self, state: jax.Array, index: int, write: Write, value: Any) -> jax.Array:
        return self.written(state, write, value)

    def written(self, state: jax.Array, write: Write, value: Any) -> jax.Array:
        return write.applied(state, value.primary if isinstance(value, Mirrored) else value)

    def whole(self, state: jax.Array) -> jax.Array:
        return state

    def of_whole(self, array: jax.Array) -> NoReturn:
        raise InvalidArgument(
            f"Variable {self.name!r} is on a parameter server, and cannot be trained by an "
            "optimizer yet. Write the update: `variable.assign_sub(learning_rate * gradient)`."
        )

    def wrap(self, array: jax.Array, topology: Topology | None, inside: bool) -> jax.Array:
        return array

    def unwrap(self, state: jax.Array, topology: Topology | None) -> jax.Array:
        return state

    def rewrap(self, array: jax.Array, topology: Topology | None) -> jax.Array:
        return array


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the rows of several arrays as one array."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


@final
class ByServers(Synchronization):
    """Writes that servers apply, each when it arrives.

    In a closure they are noted, and sent when it has been computed. Elsewhere they are sent now.
    """

    def read(self, variable: Variable, frame: Frame) -> jax.Array:
        return state_of(variable)

    def write(self, variable: Variable, frame: Frame, write: Write, value: Any) -> None:
        value = value.primary if isinstance(value, Mirrored) else value
        storage = variable._storage
        assert isinstance(storage, OnServers)
        if frame.kind is ContextKind.UPDATE:
            raise ContextError(
                f"Variable {variable.name!r} is on a parameter server, and was written in the "
                f"function given to `extended.update`. Current context: {frame}. What is computed "
                "from its value there may be out of date when it arrives. Use `assign_add` or "
                "`assign_sub` outside of `update`."
            )
        if frame.program is None:
            storage.push(write, value)
            return
        if frame.closure is None:
            raise ContextError(
                f"Variable {variable.name!r} is on a parameter server, and was written by an "
                "`rx.function` that was called directly: other writes of the same time would be "
                "lost. Run the function by `coordinator.schedule`, or write outside of it."
            )
        frame.closure.note_write(variable, write, value)
        set_state(variable, storage.written(state_of(variable), write, value))

    def write_copy(
        self, variable: Variable, frame: Frame, index: int, write: Write, value: object
    ) -> None:
        self.write(variable, frame, write, value)

    def agreed(self, variable: Variable, frame: Frame, value: jax.Array) -> jax.Array:
        return value

    def write_back(self, variable: Variable, frame: Frame, value: jax.Array) -> None:
        raise ContextError(
            f"Variable {variable.name!r} is on a parameter server, and was written in a function "
            f"that is differentiated. Current context: {frame}. Return the value from that "
            "function, with `has_aux=True`, and write it after that."
        )


_BY_SERVERS = ByServers()


@final
class ServerVariable(Variable):
    """A variable on a parameter server; in several parts, on several, with a partitioner."""

    @classmethod
    def create(
        cls,
        request: VariableRequest,
        strategy: StrategyLike,
        servers: Servers,
        where: Sequence[tuple[int, slice | None]],
        value: np.ndarray,
    ) -> ServerVariable:
        """Create a variable whose parts are on the given servers."""
        pieces = [
            Piece.create(servers, server, value if rows is None else value[rows], rows)
            for server, rows in where
        ]
        device = strategy.topology.local_devices[0]
        storage = OnServers(request.name, value.shape, value.dtype, servers, pieces, device)
        return cls._made(request, strategy, storage, _BY_SERVERS, value.dtype)

    @property
    def device(self) -> Any:
        """The device of the first part, by its name."""
        return ServerDevice(self._pieces[0].server)

    @property
    def variables(self) -> tuple[ServerVariable, ...]:
        """The parts, each a variable of its own; the variable itself if there is only one."""
        if len(self._pieces) == 1:
            return (self,)
        storage = self._storage
        assert isinstance(storage, OnServers)
        return tuple(self._part(storage, index) for index in range(len(self._pieces)))

    @property
    def _pieces(self) -> tuple[Piece | Part, ...]:
        assert isinstance(self._storage, OnServers)
        return self._storage.pieces

    def _part(self, storage: OnServers, index: int) -> ServerVariable:
        piece = self._pieces[index]
        assert piece.rows is not None
        shape = (piece.rows.stop - piece.rows.start, *self.shape[1:])
        own = storage.part(f"{self.name}/part_{index}", shape, index)
        return ServerVariable._of_parts(
            self._request, self._strategy, own, _BY_SERVERS, self._dtype
        )

    @property
    def name(self) -> str:
        return self._storage.name

    def __repr__(self) -> str:
        return f"<rx.{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype}>"
