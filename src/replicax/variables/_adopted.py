"""Variables of other libraries as ours: the library keeps the array, the rules are those here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self, final

import jax
import jax.numpy as jnp

from replicax import _context
from replicax._context import Frame, Kind
from replicax._enums import VariableAggregation
from replicax.values import Mirrored, PerReplica
from replicax.variables._creation import VariableRequest
from replicax.variables._initial import from_first_worker
from replicax.variables._mirrored import MirroredVariable
from replicax.variables._plain import PlainVariable
from replicax.variables._variable import Combine, Variable, _replace

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


class Keeper(Protocol):
    """Where a library keeps the array of one of its variables."""

    def get(self) -> jax.Array: ...

    def set(self, array: jax.Array) -> None: ...


class _Kept(Variable):
    """The state is what the keeper has; it is looked up every time, for others may change it."""

    reusable = False
    _keeper: Keeper
    _seen: jax.Array | None = None
    _state_seen: Any = None

    @property
    def _stored(self) -> Any:
        array = self._keeper.get()
        if array is not self._seen:
            self._stored = self._state_of(array)
        return self._state_seen

    @_stored.setter
    def _stored(self, state: Any) -> None:
        self._state_seen, self._seen = state, self._array_of(state)
        self._keeper.set(self._seen)

    def _state_of(self, array: jax.Array) -> Any:
        return array

    def _array_of(self, state: Any) -> jax.Array:
        return state


@final
class AdoptedPlainVariable(_Kept, PlainVariable):
    """A variable that was made outside of every scope."""

    @classmethod
    def adopt(cls, request: VariableRequest, keeper: Keeper) -> Self:
        array = keeper.get()
        self = object.__new__(cls)
        self._keeper, self._strategy, self._request = keeper, None, request
        self._shape, self._dtype = array.shape, array.dtype
        return self

    @property
    def device(self) -> jax.Device:
        return next(iter(self._keeper.get().devices()))

    @property
    def _pinned(self) -> bool:
        return self._keeper.get().committed


class AdoptedMirroredVariable(_Kept, MirroredVariable):
    """A variable of a strategy; the library's array is the one over all devices."""

    @classmethod
    def adopt(cls, request: VariableRequest, keeper: Keeper, strategy: StrategyLike) -> Self:
        array = keeper.get()
        self = object.__new__(cls)
        self._keeper, self._strategy, self._request = keeper, strategy, request
        self._shape, self._dtype = array.shape, array.dtype
        if not strategy.topology.spans_processes or array.is_fully_addressable:
            # As the strategy's own variables do, it begins with what the first worker has.
            self._stored = from_first_worker(strategy, request, array)
        return self

    def _state_of(self, array: jax.Array) -> Mirrored:
        topology = self._home.topology
        return Mirrored.from_array(topology.replicate(array), topology)

    def _array_of(self, state: Mirrored) -> jax.Array:
        return state.array(self._home.topology)


class AgreedVariable(AdoptedMirroredVariable):
    """A variable to which all replicas write the same, because they compute it from the same."""

    def _write(self, frame: Frame, combine: Combine, value: Any) -> None:
        if self._in_replica(frame):
            self._settle(frame, combine(self._read(frame), value))
        else:
            super()._write(frame, combine, value)

    def _agreed(self, frame: Frame, value: jax.Array) -> jax.Array:
        return value

    def _settle(self, frame: Frame, value: jax.Array) -> None:
        if not self._in_replica(frame):
            super()._settle(frame, value)
            return

        def merged(strategy: StrategyLike, values: PerReplica) -> None:
            # One of them is taken, so nothing has to be sent from replica to replica.
            self._write_agreed(_context.current(), _replace, values.component(0))

        assert frame.replica is not None
        label = f"a write to variable {self.name!r}"
        frame.replica.merge(label, merged, (value,), subjects=(self,))


def write(variable: Variable, value: jax.Array) -> None:
    """Writes for a library that says what the new value is, but not what was added to the old.

    A sum is over what each replica adds; but if all replicas write zeros, it begins again.
    """
    frame = _context.current()
    if (
        frame.kind is Kind.REPLICA
        and frame.replica is not None
        and frame.strategy is not None
        and variable.aggregation is VariableAggregation.SUM
    ):
        old = variable.value
        something = jnp.any(value != 0).astype(value.dtype)
        added, something = frame.replica.all_reduce("SUM", [value - old, something])
        value = jnp.where(something > 0, old + added, jnp.zeros_like(old))
    variable.assign(value)
