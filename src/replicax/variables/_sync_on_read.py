"""A variable whose copies go their own way and are combined when read across replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp

from replicax import _context
from replicax._context import Frame
from replicax._enums import VariableAggregation
from replicax.errors import AggregationRequired, ForeignValue, InvalidArgument
from replicax.values import Mirrored, PerReplica, place
from replicax.variables._copy import VariableWithCopies
from replicax.variables._creation import VariableRequest
from replicax.variables._initial import from_first_worker
from replicax.variables._variable import Combine, _replace

if TYPE_CHECKING:
    from replicax._typing import StrategyLike
    from replicax.topology import Topology


@final
class SyncOnReadVariable(VariableWithCopies):
    """Made with `synchronization=ON_READ`: replicas read and write their own copy, for free."""

    @classmethod
    def create(cls, request: VariableRequest, strategy: StrategyLike) -> SyncOnReadVariable:
        array = request.initial_array()
        topology = strategy.topology
        copies = from_first_worker(strategy, request, array).values
        state = PerReplica(copies, topology, shapes=[array.shape] * topology.num_replicas)
        return cls._build(request, strategy, state, array)

    @property
    def device(self) -> jax.Device:
        frame = _context.current()
        index = frame.replica.local_index if self._in_replica(frame) and frame.replica else 0
        return self._home.topology.local_devices[index]

    def read_copy(self, index: int) -> jax.Array:
        return self.state.component(index)

    def write_copy(self, frame: Frame, index: int, combine: Combine, value: Any) -> None:
        home = self._home.topology.local_homes[index]
        new = combine(self.read_copy(index), place(value, home))
        self.set_state(self.state.replaced(index, new))

    def _read(self, frame: Frame) -> jax.Array:
        index = self._own_copy(frame)
        if index is not None:
            return self.read_copy(index)
        if self.aggregation is VariableAggregation.NONE:
            raise AggregationRequired(
                f"Variable {self.name!r} is ON_READ without an `aggregation`, so it has no single "
                f"value. Current context: {frame}. Read `variable.values`, or create it with "
                "`aggregation=rx.VariableAggregation.SUM` (or MEAN, ONLY_FIRST_REPLICA)."
            )
        total = self._home.collectives.aggregate(self.aggregation, self.state).primary
        return total if frame.replica is None else place(total, frame.replica.home)

    def _write(self, frame: Frame, combine: Combine, value: Any) -> None:
        index = self._own_copy(frame)
        if index is not None:
            value = value.component(index) if isinstance(value, Mirrored) else value
            self.write_copy(frame, index, combine, value)
            return
        if combine is not _replace:
            raise InvalidArgument(
                f"`assign_add` and `assign_sub` of the ON_READ variable {self.name!r} mean nothing "
                f"across replicas: each has its own copy. Current context: {frame}. Call them in "
                "the function given to `run`, or use `assign`."
            )
        self._settle(frame, value.primary if isinstance(value, Mirrored) else value)

    def _agreed(self, frame: Frame, value: jax.Array) -> jax.Array:
        return value

    def _settle(self, frame: Frame, value: jax.Array) -> None:
        index = self._own_copy(frame)
        if index is not None:
            self.set_state(self.state.replaced(index, value))
            return
        shares = _spread(value, self._home.topology.num_replicas, self.aggregation)
        self.set_state(self._home.collectives.distribute(shares))

    def cross_replica_array(self) -> jax.Array:
        raise InvalidArgument(
            f"The ON_READ variable {self.name!r} has copies that differ and cannot be trained. "
            "Create it without `synchronization=ON_READ`."
        )

    def store_cross_replica_array(self, array: jax.Array) -> None:
        self.cross_replica_array()

    @property
    def split_over_replicas(self) -> bool:
        return True

    def wrap_state(self, array: jax.Array, topology: Topology | None, inside: bool) -> PerReplica:
        home = self._home.topology
        return PerReplica.from_array(array, home, scalars=not self.shape, inside=inside)

    def unwrap_state(self, state: PerReplica, topology: Topology | None) -> jax.Array:
        if topology is not None and topology != self._home.topology:
            raise ForeignValue(
                f"The ON_READ variable {self.name!r} belongs to {self._home!r} and cannot be used "
                f"in a program on {topology}. Read it before, and pass the value."
            )
        return state.array(self._home.topology)

    def rewrap_state(self, array: jax.Array, topology: Topology | None) -> PerReplica:
        return self.wrap_state(array, topology, inside=False)

    def _own_copy(self, frame: Frame) -> int | None:
        """The copy that belongs to `frame`; None when it looks across replicas."""
        if self._in_replica(frame) and frame.replica is not None:
            return frame.replica.local_index
        return frame.copy if self._in_update(frame) else None


def _spread(value: jax.Array, replicas: int, aggregation: VariableAggregation) -> list[jax.Array]:
    """What each replica's copy has to be for the aggregate to be `value` again."""
    if aggregation is not VariableAggregation.SUM:
        return [value] * replicas
    if not jnp.issubdtype(value.dtype, jnp.integer):
        return [value / replicas] * replicas
    # Whole numbers do not always divide; the first replicas take what is left over.
    quotient, rest = jnp.divmod(value, replicas)
    return [quotient + (rest > replica).astype(value.dtype) for replica in range(replicas)]
