"""Keras variables as replicax variables."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, final

import jax
import jax.numpy as jnp
import keras

from replicax import _context
from replicax._context import Frame
from replicax._enums import VariableAggregation, VariableSynchronization
from replicax.errors import InvalidArgument
from replicax.integrations.keras._private import get_array, set_array
from replicax.integrations.keras._records import records
from replicax.variables import (
    AgreedOnWrite,
    Synchronization,
    Variable,
    VariableRequest,
    Write,
    adopt,
    in_replica,
)

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

_AGGREGATIONS = {
    "sum": VariableAggregation.SUM,
    "mean": VariableAggregation.MEAN,
    "only_first_replica": VariableAggregation.ONLY_FIRST_REPLICA,
}


def belongs_to(variable: keras.Variable, strategy: StrategyLike) -> None:
    """Record the strategy in whose scope a variable is created."""
    records.variable(variable).owner = strategy


def adopted(variable: keras.Variable, strategy: StrategyLike | None = None) -> Variable:
    """Return our variable for a Keras variable, which gets `strategy` if it has no other."""
    record = records.variable(variable)
    found, owner = record.adopted, record.owner or strategy
    unowned = owner is None and _is_seed(variable)
    if unowned:
        owner = _context.current().strategy  # the one that draws now; the next may be another
    if found is None or (found.strategy is not owner and (unowned or found.strategy is None)):
        # It is created immediately, even while a program is traced.
        outside = _context.entered(_context.Frame())
        with outside, jax.ensure_compile_time_eval():
            found = _adopt(variable, owner)
        record.adopted = found
    return found


def _adopt(variable: keras.Variable, strategy: StrategyLike | None) -> Variable:
    keeper = _InKeras(variable)
    request = VariableRequest(
        None,
        variable.trainable,
        variable.path,
        None,
        VariableSynchronization.AUTO,
        _aggregation(variable),
    )
    if _is_seed(variable):
        return adopt(request, keeper, strategy, _OwnSeeds())
    if request.aggregation is VariableAggregation.SUM:
        return adopt(request, keeper, strategy, AgreedOnWrite())  # `write` computes the sum
    return adopt(request, keeper, strategy)


def _aggregation(variable: keras.Variable) -> VariableAggregation:
    """Return the variable's aggregation; running averages, whose layers set none, are averaged."""
    stated = _AGGREGATIONS.get(variable.aggregation)
    if stated is VariableAggregation.SUM and variable.dtype == "bool":
        raise InvalidArgument(
            f"The Keras variable {variable.path!r} is a truth value, and has `aggregation='sum'`. "
            "Give it a number's dtype, or another aggregation."
        )
    if stated is not None or variable.trainable:
        return stated or VariableAggregation.NONE
    if jnp.issubdtype(variable.dtype, jnp.floating):
        return VariableAggregation.MEAN
    return VariableAggregation.ONLY_FIRST_REPLICA


def _is_seed(variable: keras.Variable) -> bool:
    """Tell by its name whether a variable is the state of a `keras.random.SeedGenerator`."""
    return variable.name == "seed_generator_state"


@final
class _InKeras:
    """A keeper of the array in a Keras variable, which its model keeps alive."""

    has_all_copies = True

    __slots__ = ("_path", "_reference")

    def __init__(self, variable: keras.Variable) -> None:
        self._reference, self._path = weakref.ref(variable), variable.path

    def get(self) -> jax.Array:
        return get_array(self._variable)

    def set(self, array: jax.Array) -> None:
        set_array(self._variable, array)

    @property
    def _variable(self) -> keras.Variable:
        variable = self._reference()
        if variable is None:
            raise InvalidArgument(
                f"A compiled function uses the Keras variable {self._path!r}, which no longer "
                "exists: its model was deleted, or replaced by another one. Make the function "
                "anew, or pass what changes as an argument."
            )
        return variable


@final
class _OwnSeeds(Synchronization):
    """The rules for a seed and a count: only the first replica draws as one device would.

    Each replica reads them with an offset added to the seed, and subtracts it on writing back.
    """

    def __init__(self) -> None:
        self._common = AgreedOnWrite()

    def read(self, variable: Variable, frame: Frame) -> jax.Array:
        return self._common.read(variable, frame) + _own_seed(variable, frame)

    def write(self, variable: Variable, frame: Frame, write: Write, value: object) -> None:
        if in_replica(variable, frame):
            self.write_back(variable, frame, write.applied(self.read(variable, frame), value))
        else:
            self._common.write(variable, frame, write, value)

    def write_copy(
        self, variable: Variable, frame: Frame, index: int, write: Write, value: object
    ) -> None:
        self._common.write_copy(variable, frame, index, write, value)

    def agreed(self, variable: Variable, frame: Frame, value: jax.Array) -> jax.Array:
        return value

    def write_back(self, variable: Variable, frame: Frame, value: jax.Array) -> None:
        self._common.write_back(variable, frame, value - _own_seed(variable, frame))


def _own_seed(variable: Variable, frame: Frame) -> jax.Array:
    """Return a replica's offset: a multiple of a large odd number, so that seeds are far apart."""
    replica = frame.replica if in_replica(variable, frame) else None
    number = 0 if replica is None else replica.replica_id_in_sync_group
    own = jnp.asarray(number, variable.dtype) * jnp.asarray(0x9E3779B9, jnp.uint32)
    return jnp.stack([own.astype(variable.dtype), jnp.zeros((), variable.dtype)])
