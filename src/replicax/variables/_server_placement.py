"""The placement of variables on parameter servers, one after another."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _context
from replicax._describing import described
from replicax.errors import InvalidArgument, InvalidType
from replicax.parameter_server import Servers
from replicax.topology import Topology
from replicax.variables._creation import VariableRequest
from replicax.variables._division import VariablePartitioner
from replicax.variables._placement import VariablePlacement
from replicax.variables._server_storage import OnServers, ServerVariable, closure_of
from replicax.variables._server_updates import UpdateFunction, updates_by_server
from replicax.variables._state import set_state, state_of
from replicax.variables._storage import Keeper, Storage
from replicax.variables._variable import Variable, storage_of

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


@final
class ServerPlacement(VariablePlacement):
    """Variables on parameter servers: each on the next one, or in parts on several.

    Args:
      servers: The servers.
      partitioner: A function of a shape and a dtype that returns the number of parts for each
        dimension. Only the first one can have several. By default variables stay whole.
    """

    sends_updates = True

    def __init__(self, servers: Servers, partitioner: VariablePartitioner | None = None) -> None:
        self._servers, self._partitioner = servers, partitioner
        self._next = 0
        self._lock = threading.Lock()

    def create(
        self, request: VariableRequest, strategy: StrategyLike, colocate_with: object
    ) -> Variable:
        if request.partition is not None:
            raise InvalidArgument(
                f"Variable {request.name!r} cannot be divided over logical devices: it is on a "
                "parameter server. Create it outside of `partition`."
            )
        value = request.initial_array()
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise InvalidType(
                f"Variable {request.name!r} has dtype {value.dtype}, and a parameter server keeps "
                "numbers. Keep random keys as `jax.random.key_data(key)`."
            )
        array = np.asarray(value)
        beside = storage_of(colocate_with) if isinstance(colocate_with, Variable) else None
        is_copied = False
        if isinstance(beside, OnServers) and not array.ndim and beside.shape != array.shape:
            # A number that belongs to others, such as a count of updates, is on every server, so
            # that each can update its own variables.
            first, count = beside.pieces[0].server, len(self._servers)
            where = [((first + index) % count, None) for index in range(count)]
            is_copied = count > 1
        elif isinstance(beside, OnServers) and beside.shape == array.shape:
            where = [(piece.server, piece.rows) for piece in beside.pieces]
            is_copied = beside.is_copied
        elif isinstance(beside, OnServers):
            where = [(beside.pieces[0].server, None)]
        else:
            rows = self._rows(request.name, array)
            where = list(zip(self._take_turns(len(rows)), rows, strict=True))
        return ServerVariable.create(
            request, strategy, self._servers, where, array, is_copied=is_copied
        )

    def send_update(
        self,
        variables: Sequence[Variable],
        function: UpdateFunction,
        operands: Sequence[jax.Array],
        owners: Sequence[Variable | None],
    ) -> None:
        closure = closure_of(variables[0], _context.current())
        closure.note_updates(updates_by_server(variables, function, operands, owners))
        # What the rest of the function reads.
        values = [state_of(variable) for variable in variables]
        for variable, value in zip(variables, function(values, list(operands)), strict=True):
            set_state(variable, value)

    def devices(self, topology: Topology) -> tuple[jax.Device, ...]:
        return topology.local_devices

    def storage_of_kept(
        self, name: str, strategy: StrategyLike, array: jax.Array, keeper: Keeper
    ) -> Storage:
        self._refuse_kept(name)

    def _refuse_kept(self, name: str) -> NoReturn:
        raise InvalidArgument(
            f"Variable {name!r} is kept by another library, such as Keras or Flax, and cannot be "
            "on a parameter server. Create the state of the model with `rx.Variable`, or use "
            "another strategy."
        )

    def _take_turns(self, count: int) -> list[int]:
        """Return the servers of the next parts."""
        with self._lock:
            first, self._next = self._next, self._next + count
        return [number % len(self._servers) for number in range(first, first + count)]

    def _rows(self, name: str, array: np.ndarray) -> Sequence[slice | None]:
        """Return the rows of each part, the first ones with one more; None if it stays whole."""
        if self._partitioner is None or not array.ndim:
            return [None]
        counts = self._partitioner(array.shape, array.dtype)
        if (
            not isinstance(counts, Sequence)
            or len(counts) != array.ndim
            or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) for n in counts)
            or any(n != 1 for n in counts[1:])
            or not 1 <= counts[0] <= max(1, len(array))
        ):
            raise InvalidArgument(
                "The `variable_partitioner` of a ParameterServerStrategy returns the number of "
                "parts of each dimension, which is 1 for all but the first, and at most the "
                f"number of rows there; got {described(counts)} for variable {name!r} of shape "
                f"{array.shape}."
            )
        if counts[0] == 1:
            return [None]
        size, more = divmod(len(array), int(counts[0]))
        starts = [index * size + min(index, more) for index in range(int(counts[0]) + 1)]
        return [slice(start, stop) for start, stop in itertools.pairwise(starts)]
