"""Synchronization: when copies are brought together. A variable's other part is its storage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp

from replicax import _context
from replicax._context import ContextKind, Frame
from replicax._enums import VariableAggregation
from replicax.errors import AggregationRequired, ContextError, InvalidArgument
from replicax.values import Mirrored, PerReplica, place
from replicax.variables._state import set_state, state_of
from replicax.variables._storage import OwnCopies
from replicax.variables._write import Write

if TYPE_CHECKING:
    from replicax._typing import StrategyLike
    from replicax.variables._variable import Variable


class Synchronization(ABC):
    """The meaning of reads and writes of a variable in each context. It has no state of its own."""

    @abstractmethod
    def read(self, variable: Variable, frame: Frame) -> jax.Array:
        """Return the value as seen from `frame`."""

    @abstractmethod
    def write(self, variable: Variable, frame: Frame, write: Write, value: object) -> None:
        """Write a value, following the rules of `frame`."""

    @abstractmethod
    def write_copy(
        self, variable: Variable, frame: Frame, index: int, write: Write, value: object
    ) -> None:
        """Write a value to one copy, where the rules of `frame` allow it."""

    @abstractmethod
    def agreed(self, variable: Variable, frame: Frame, value: jax.Array) -> jax.Array:
        """Return the variable's value once all replicas' values are combined."""

    @abstractmethod
    def write_back(self, variable: Variable, frame: Frame, value: jax.Array) -> None:
        """Store a value that all replicas have agreed on."""


def own_copy(variable: Variable, frame: Frame) -> int | None:
    """Return the index of the copy that belongs to `frame`; None if it looks across replicas."""
    if variable.strategy is None or frame.strategy is not variable.strategy:
        return None
    if frame.kind is ContextKind.REPLICA and frame.replica is not None:
        return frame.replica.local_index
    return frame.copy if frame.kind is ContextKind.UPDATE else None


def in_replica(variable: Variable, frame: Frame) -> bool:
    """Tell whether a replica of the variable's own strategy is running."""
    own = variable.strategy is not None and frame.strategy is variable.strategy
    return own and frame.kind is ContextKind.REPLICA


def _read(variable: Variable, frame: Frame) -> jax.Array:
    sharding = None if frame.replica is None else frame.replica.sharding
    return variable._storage.read(state_of(variable), own_copy(variable, frame), sharding)


@final
class Unsynchronized(Synchronization):
    """One copy, which belongs to one replica or to none."""

    def read(self, variable: Variable, frame: Frame) -> jax.Array:
        return _read(variable, frame)

    def write(self, variable: Variable, frame: Frame, write: Write, value: Any) -> None:
        value = self.agreed(variable, frame, value)
        set_state(variable, variable._storage.written(state_of(variable), write, value))

    def write_copy(
        self, variable: Variable, frame: Frame, index: int, write: Write, value: object
    ) -> None:
        self.write(variable, frame, write, value)

    def agreed(self, variable: Variable, frame: Frame, value: jax.Array) -> jax.Array:
        if (
            frame.kind is ContextKind.REPLICA
            and frame.replica
            and frame.replica.num_replicas_in_sync > 1
        ):
            raise ContextError(
                f"Variable {variable.name!r} has one copy and cannot be written by "
                f"{frame.replica.num_replicas_in_sync} replicas. Current context: {frame}. Create "
                "it in `strategy.scope()` with an `aggregation`, or write it outside `run`."
            )
        return value

    def write_back(self, variable: Variable, frame: Frame, value: jax.Array) -> None:
        set_state(variable, variable._storage.written(state_of(variable), Write.ASSIGN, value))


@final
class OnWrite(Synchronization):
    """Agreement of the replicas on a value before it is written; other contexts write directly."""

    def read(self, variable: Variable, frame: Frame) -> jax.Array:
        return _read(variable, frame)

    def write(self, variable: Variable, frame: Frame, write: Write, value: object) -> None:
        if not in_replica(variable, frame):
            write_agreed(variable, frame, write, value)
            return
        _require_aggregation(variable, frame)

        def merged(strategy: StrategyLike, values: PerReplica) -> None:
            combined = strategy.collectives.aggregate(variable.aggregation, values)
            write_agreed(variable, _context.current(), write, combined)

        assert frame.replica is not None
        label = f"{write.value} of variable {variable.name!r}"
        frame.replica.merge(label, merged, (value,), subjects=(variable, write))

    def write_copy(
        self, variable: Variable, frame: Frame, index: int, write: Write, value: object
    ) -> None:
        if frame.kind is not ContextKind.UPDATE or own_copy(variable, frame) != index:
            raise ContextError(
                f"One copy of the mirrored variable {variable.name!r} was written, which would "
                f"make its copies differ. Current context: {frame}. Assign to the variable itself, "
                "or use `strategy.extended.update(variable, fn)`."
            )
        write_agreed(variable, frame, write, value)

    def agreed(self, variable: Variable, frame: Frame, value: jax.Array) -> jax.Array:
        if not in_replica(variable, frame):
            return value
        _require_aggregation(variable, frame)
        assert frame.replica is not None
        return frame.replica.aggregate(variable, value)

    def write_back(self, variable: Variable, frame: Frame, value: jax.Array) -> None:
        if not in_replica(variable, frame):
            write_agreed(variable, frame, Write.ASSIGN, value)
            return

        # All replicas arrive with the same value; one with another value is reported.
        def merged(strategy: StrategyLike, values: PerReplica) -> None:
            agreed = strategy.collectives.broadcast(values)
            write_agreed(variable, _context.current(), Write.ASSIGN, agreed)

        assert frame.replica is not None
        label = f"writing what variable {variable.name!r} was assigned while differentiating"
        frame.replica.merge(label, merged, (value,), subjects=(variable,))


def write_agreed(variable: Variable, frame: Frame, write: Write, value: object) -> None:
    """Write a value that is the same for all replicas, in cross-replica or update context."""
    storage, state, index = variable._storage, state_of(variable), own_copy(variable, frame)
    if index is None:
        set_state(variable, storage.written(state, write, value))
    else:
        set_state(variable, storage.with_copy(state, index, write, value))


def _require_aggregation(variable: Variable, frame: Frame) -> None:
    if variable.aggregation is VariableAggregation.NONE:
        raise AggregationRequired(
            f"Variable {variable.name!r} was assigned to by a replica, but has no `aggregation` to "
            f"combine the replicas' values. Current context: {frame}. Create it with "
            "`aggregation=rx.VariableAggregation.MEAN` (or SUM, ONLY_FIRST_REPLICA), or assign "
            "from `merge_call` or outside `run`."
        )


@final
class OnRead(Synchronization):
    """Copies that replicas read and write on their own, combined when read across replicas."""

    def read(self, variable: Variable, frame: Frame) -> jax.Array:
        state, index = state_of(variable), own_copy(variable, frame)
        if index is not None:
            return variable._storage.read(state, index)
        if variable.aggregation is VariableAggregation.NONE:
            raise AggregationRequired(
                f"Variable {variable.name!r} is ON_READ without an `aggregation`, so it has no "
                f"single value. Current context: {frame}. Read `variable.values`, or create it "
                "with `aggregation=rx.VariableAggregation.SUM` (or MEAN, ONLY_FIRST_REPLICA)."
            )
        assert variable.strategy is not None
        total = variable.strategy.collectives.aggregate(variable.aggregation, state).primary
        return total if frame.replica is None else place(total, frame.replica.sharding)

    def write(self, variable: Variable, frame: Frame, write: Write, value: Any) -> None:
        index = own_copy(variable, frame)
        if index is not None:
            self.write_copy(variable, frame, index, write, value)
            return
        if write is not Write.ASSIGN:
            raise InvalidArgument(
                f"`assign_add` and `assign_sub` of the ON_READ variable {variable.name!r} mean "
                f"nothing across replicas: each has its own copy. Current context: {frame}. Call "
                "them in the function given to `run`, or use `assign`."
            )
        self.write_back(variable, frame, value.primary if isinstance(value, Mirrored) else value)

    def write_copy(
        self, variable: Variable, frame: Frame, index: int, write: Write, value: object
    ) -> None:
        state = state_of(variable)
        set_state(variable, variable._storage.with_copy(state, index, write, value))

    def agreed(self, variable: Variable, frame: Frame, value: jax.Array) -> jax.Array:
        return value

    def write_back(self, variable: Variable, frame: Frame, value: jax.Array) -> None:
        index = own_copy(variable, frame)
        if index is not None:
            self.write_copy(variable, frame, index, Write.ASSIGN, value)
            return
        storage, strategy = variable._storage, variable.strategy
        assert isinstance(storage, OwnCopies)
        assert strategy is not None
        shares = _spread(value, strategy.topology.num_replicas, variable.aggregation)
        set_state(variable, storage.of_copies(shares))


def _spread(value: jax.Array, replicas: int, aggregation: VariableAggregation) -> list[jax.Array]:
    """Return copies whose aggregate is `value` again."""
    if aggregation is not VariableAggregation.SUM:
        return [value] * replicas
    if not jnp.issubdtype(value.dtype, jnp.integer):
        return [value / replicas] * replicas
    # Whole numbers do not always divide evenly; the first replicas take what is left over.
    quotient, rest = jnp.divmod(value, replicas)
    return [quotient + (rest > replica).astype(value.dtype) for replica in range(replicas)]


@final
class AgreedOnWrite(Synchronization):
    """Writes that are equal on all replicas, because they are computed from equal values."""

    def __init__(self) -> None:
        self._elsewhere = OnWrite()

    def read(self, variable: Variable, frame: Frame) -> jax.Array:
        return self._elsewhere.read(variable, frame)

    def write(self, variable: Variable, frame: Frame, write: Write, value: object) -> None:
        if in_replica(variable, frame):
            self.write_back(variable, frame, write.applied(self.read(variable, frame), value))
        else:
            self._elsewhere.write(variable, frame, write, value)

    def write_copy(
        self, variable: Variable, frame: Frame, index: int, write: Write, value: object
    ) -> None:
        self._elsewhere.write_copy(variable, frame, index, write, value)

    def agreed(self, variable: Variable, frame: Frame, value: jax.Array) -> jax.Array:
        return value

    def write_back(self, variable: Variable, frame: Frame, value: jax.Array) -> None:
        if not in_replica(variable, frame):
            self._elsewhere.write_back(variable, frame, value)
            return

        def merged(strategy: StrategyLike, values: PerReplica) -> None:
            # One of the values is taken, so nothing is sent from replica to replica.
            write_agreed(variable, _context.current(), Write.ASSIGN, values.component(0))

        assert frame.replica is not None
        label = f"a write to variable {variable.name!r}"
        frame.replica.merge(label, merged, (value,), subjects=(variable,))


@final
class OfOneCopy(Synchronization):
    """The copy of one replica, by the rules of the variable that it is part of."""

    def __init__(self, container: Variable, index: int) -> None:
        self._container, self._index = container, index

    def read(self, variable: Variable, frame: Frame) -> jax.Array:
        container = self._container
        own = in_replica(container, frame) and own_copy(container, frame) == self._index
        if frame.overlay is not None and own:
            return container.value  # A differentiated function may see another value.
        return container._storage.read(state_of(container), self._index)

    def write(self, variable: Variable, frame: Frame, write: Write, value: object) -> None:
        self.write_copy(variable, frame, self._index, write, value)

    def write_copy(
        self, variable: Variable, frame: Frame, index: int, write: Write, value: object
    ) -> None:
        container = self._container
        container._synchronization.write_copy(container, frame, index, write, value)

    def agreed(self, variable: Variable, frame: Frame, value: jax.Array) -> jax.Array:
        return value

    def write_back(self, variable: Variable, frame: Frame, value: jax.Array) -> None:
        self.write(variable, frame, Write.ASSIGN, value)
