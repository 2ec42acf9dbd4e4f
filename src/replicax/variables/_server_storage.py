"""Variables on parameter servers: their storage, and the meaning of reads and writes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from replicax import _context
from replicax._context import Frame
from replicax.errors import ContextError, InvalidArgument, InvalidType, ShapeMismatch
from replicax.parameter_server import Change, Servers, WriteTo
from replicax.topology import DeviceOrSharding, Topology
from replicax.values import Mirrored
from replicax.variables._creation import VariableRequest
from replicax.variables._sparse import IndexedSlices
from replicax.variables._state import set_state, state_of
from replicax.variables._storage import Storage
from replicax.variables._synchronization import Synchronization
from replicax.variables._variable import Variable
from replicax.variables._write import Write

if TYPE_CHECKING:
    from replicax._typing import ClosureLike, State, StrategyLike


@final
@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Kept:
    """An array on a server, which is removed when nothing refers to this any more."""

    @classmethod
    def of(cls, servers: Servers, server: int, number: int) -> Kept:
        self = cls()
        weakref.finalize(self, servers.forget, server, number).atexit = False
        return self


@final
@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of a variable, or all of it, in an array on a server.

    Args:
      server: The index of the server.
      number: The number of the array there.
      rows: The rows; None if it is the whole variable.
      kept: Keeps the array; None in other processes than the one that has created it.
    """

    server: int
    number: int
    rows: slice | None = None
    kept: Kept | None = field(default=None, compare=False, repr=False)

    @classmethod
    def create(
        cls, servers: Servers, server: int, value: np.ndarray, rows: slice | None = None
    ) -> Piece:
        """Put a value on a server, for as long as something refers to the piece."""
        number = servers.create(server, value)
        return cls(server, number, rows, Kept.of(servers, server, number))

    def __reduce__(self) -> Any:
        return Piece, (self.server, self.number, self.rows)

    @property
    def place(self) -> tuple[int, int]:
        """The server, and the number of the array there."""
        return self.server, self.number

    def of(self, value: np.ndarray) -> np.ndarray:
        """Return the rows that belong here."""
        return value if self.rows is None else value[self.rows]

    def rows_of(self, rows: np.ndarray) -> tuple[Any, np.ndarray]:
        """Return which of some rows belong here, and their numbers here."""
        if self.rows is None:
            return slice(None), rows
        inside = (rows >= self.rows.start) & (rows < self.rows.stop)
        return inside, rows[inside] - self.rows.start


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
      is_copied: Whether each piece is a copy of the whole value, on a server of its own.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        servers: Servers,
        pieces: Sequence[Piece],
        device: jax.Device,
        *,
        is_copied: bool = False,
    ) -> None:
        super().__init__(name, shape, None)
        self.pieces, self._servers = tuple(pieces), servers
        self.dtype, self._device = dtype, device
        self.is_copied = is_copied

    @property
    def parts(self) -> tuple[Piece, ...]:
        """The pieces that the value is read from: of several copies the first one."""
        return self.pieces[:1] if self.is_copied else self.pieces

    @property
    def stored(self) -> State:
        """The value, which is on the servers."""
        values = self._servers.read(part.place for part in self.parts)
        return jax.device_put(joined([values[each.place] for each in self.parts]), self._device)

    @stored.setter
    def stored(self, state: Any) -> None:
        self.push(Write.ASSIGN, state)

    def read_rows(self, rows: np.ndarray) -> jax.Array:
        """Return some rows of the value; only these come from the servers."""
        return jax.device_put(read_rows(self._servers, self.parts, rows), self._device)

    def push(self, write: Write, value: Any, rows: Any = None) -> None:
        """Have the servers write a value, or add it to rows."""
        array = np.asarray(value, self.dtype)
        self._servers.apply(changes_by_server(self.pieces, write, array, rows))

    def part(self, name: str, shape: tuple[int, ...], index: int) -> OnServers:
        """Return the storage of one of the pieces, which stays where it is."""
        piece = replace(self.pieces[index], rows=None)
        return OnServers(name, shape, self.dtype, self._servers, [piece], self._device)

    def example(self, topology: Topology | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

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

    def of_whole(self, array: jax.Array) -> jax.Array:
        if _context.current().program is not None:
            raise InvalidArgument(
                f"Variable {self.name!r} is on a parameter server, and cannot be set in a program "
                "by this library. Write to it with `assign_add` and the like."
            )
        return array

    def wrap(self, array: jax.Array, topology: Topology | None, inside: bool) -> jax.Array:
        return array

    def unwrap(self, state: jax.Array, topology: Topology | None) -> jax.Array:
        return state

    def rewrap(self, array: jax.Array, topology: Topology | None) -> jax.Array:
        return array


def changes_by_server(
    pieces: Sequence[Piece], write: Write, value: np.ndarray, rows: Any = None
) -> dict[int, list[Change]]:
    """Return a write, or an addition to rows, as the changes of each piece, by its server."""
    changes: dict[int, list[Change]] = {}
    for piece in pieces:
        if rows is None:
            change = WriteTo(piece.number, write.value, piece.of(value))
        else:
            inside, own_rows = piece.rows_of(np.asarray(rows))
            change = WriteTo(piece.number, write.value, value[inside], own_rows)
        changes.setdefault(piece.server, []).append(change)
    return changes


def require_rows(rows: np.ndarray, count: int, name: str) -> None:
    """Refuse rows that a variable does not have."""
    if rows.size and (rows.min() < 0 or rows.max() >= count):
        row = int(rows.min()) if rows.min() < 0 else int(rows.max())
        raise InvalidArgument(
            f"Variable {name!r} has {count} rows, numbered from 0; got row {row}. Look at where "
            "the numbers come from."
        )


def read_rows(servers: Servers, parts: Sequence[Piece], rows: np.ndarray) -> np.ndarray:
    """Return some rows of a variable in parts."""
    found = [part.rows_of(rows) for part in parts]
    wanted = [
        (part.server, part.number, own)
        for part, (_, own) in zip(parts, found, strict=True)
        if len(own) or len(parts) == 1
    ]
    arrays = servers.read_rows(wanted)
    if len(parts) == 1:
        return arrays[0]
    result = np.empty((len(rows), *arrays[0].shape[1:]), arrays[0].dtype)
    remaining = iter(arrays)
    for inside, own in found:
        if len(own):
            result[inside] = next(remaining)
    return result


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
        if frame.program is None:
            storage.push(write, value)
            return
        closure_of(variable, frame).note_write(variable, write, value)
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


def closure_of(variable: Variable, frame: Frame) -> ClosureLike:
    """Return the closure that is being traced; refuse other programs, which cannot write."""
    if frame.closure is None or frame.program is None:
        raise ContextError(
            f"Variable {variable.name!r} is on a parameter server, and was changed where other "
            "changes of the same time would be lost: by an `rx.function` that was called directly, "
            f"or by an update outside of functions. Current context: {frame}. Do it in a function "
            "that `coordinator.schedule` runs."
        )
    return frame.closure


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
        *,
        is_copied: bool = False,
    ) -> ServerVariable:
        """Create a variable whose parts, or copies, are on the given servers."""
        pieces = [
            Piece.create(servers, server, value if rows is None else value[rows], rows)
            for server, rows in where
        ]
        device = strategy.topology.local_devices[0]
        storage = OnServers(
            request.name, value.shape, value.dtype, servers, pieces, device, is_copied=is_copied
        )
        return cls._made(request, strategy, storage, _BY_SERVERS, value.dtype)

    @property
    def device(self) -> Any:
        """The device of the first part, by its name."""
        return ServerDevice(self._pieces[0].server)

    @property
    def variables(self) -> tuple[ServerVariable, ...]:
        """The parts, each a variable of its own; the variable itself if there is only one."""
        storage = self._storage
        assert isinstance(storage, OnServers)
        if len(storage.parts) == 1:
            return (self,)
        return tuple(self._part(storage, index) for index in range(len(self._pieces)))

    def sparse_read(self, indices: Any, name: str | None = None) -> jax.Array:
        """Return the rows at `indices`; only these come from the servers."""
        frame = _context.current()
        rows = self._known_rows(indices)
        if frame.closure is not None and frame.program is not None:
            return frame.closure.look_up(self, jnp.asarray(rows))
        if frame.program is not None or frame.overlay is not None:
            return super().sparse_read(indices)
        storage = self._storage
        assert isinstance(storage, OnServers)
        found = storage.read_rows(rows.reshape(-1))
        return found.reshape(*rows.shape, *self.shape[1:])

    def scatter_add(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Add to some rows; only these travel to the servers."""
        return self._add_to_rows(Write.ADD, sparse_delta)

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Subtract from some rows; only these travel to the servers."""
        return self._add_to_rows(Write.SUB, sparse_delta)

    def _add_to_rows(self, write: Write, slices: IndexedSlices) -> Variable:
        frame = _context.current()
        if frame.overlay is not None or not isinstance(slices, IndexedSlices):
            method = super().scatter_add if write is Write.ADD else super().scatter_sub
            return method(slices)
        rows = self._known_rows(slices.indices)
        values = self._fitting(slices.values)
        if values.shape != (*rows.shape, *self.shape[1:]):
            raise ShapeMismatch(
                f"Rows {list(rows.shape)} of variable {self.name!r}, which has shape {self.shape}, "
                f"were given values of shape {values.shape}."
            )
        flat = values.reshape(-1, *self.shape[1:])
        storage = self._storage
        assert isinstance(storage, OnServers)
        if frame.program is None:
            storage.push(write, flat, rows.reshape(-1))
            return self
        rows = jnp.asarray(rows).reshape(-1)
        closure_of(self, frame).note_rows(self, write, rows, flat)
        changed = state_of(self).at[rows]
        set_state(self, changed.add(flat) if write is Write.ADD else changed.subtract(flat))
        return self

    def _known_rows(self, indices: Any) -> Any:
        """Return the numbers of rows as an array of NumPy, if they are known, and check them."""
        if not self.ndim:
            raise ShapeMismatch(f"Variable {self.name!r} is a scalar, and has no rows.")
        if isinstance(indices, Tracer):
            rows = indices
        else:
            rows = np.asarray(indices)
            require_rows(rows, self.shape[0], self.name)
        if not jnp.issubdtype(rows.dtype, np.integer):
            raise InvalidType(f"Rows are whole numbers; got dtype {rows.dtype}.")
        return rows

    @property
    def _pieces(self) -> tuple[Piece, ...]:
        assert isinstance(self._storage, OnServers)
        return self._storage.pieces

    def _part(self, storage: OnServers, index: int) -> ServerVariable:
        piece = self._pieces[index]
        assert piece.rows is not None
        shape = (piece.rows.stop - piece.rows.start, *self.shape[1:])
        own = storage.part(f"{self.name}/part_{index}", shape, index)
        return ServerVariable._of_parts(self._request, self._strategy, own, _BY_SERVERS, self.dtype)

    @property
    def name(self) -> str:
        return self._storage.name

    def __repr__(self) -> str:
        return f"<rx.{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype}>"
