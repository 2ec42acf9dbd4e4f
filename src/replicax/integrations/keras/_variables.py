"""Keras variables as ours."""

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
from replicax.variables import (
    AdoptedMirroredVariable,
    AdoptedPlainVariable,
    AgreedVariable,
    Variable,
    VariableRequest,
)

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

# Keras variables compare by value, so they are known by their id, and forgotten when they end.
_owners: dict[int, StrategyLike] = {}
_adopted: dict[int, Variable] = {}

_AGGREGATIONS = {
    "sum": VariableAggregation.SUM,
    "mean": VariableAggregation.MEAN,
    "only_first_replica": VariableAggregation.ONLY_FIRST_REPLICA,
}


def belongs_to(variable: keras.Variable, strategy: StrategyLike) -> None:
    """Notes in whose scope a variable is made."""
    _owners[id(variable)] = strategy
    weakref.finalize(variable, _owners.pop, id(variable), None)


def adopted(variable: keras.Variable, strategy: StrategyLike | None = None) -> Variable:
    """What stands for a Keras variable; of `strategy`, if nobody else has it."""
    found, owner = _adopted.get(id(variable)), _owners.get(id(variable), strategy)
    nobodys = owner is None and _is_seed(variable)
    if nobodys:
        owner = _context.current().strategy  # which draws from it; another may do so next
    if found is None or (found.strategy is not owner and (nobodys or found.strategy is None)):
        # Now, also while a program is traced.
        outside = _context.entered(_context.Frame())
        with outside, jax.ensure_compile_time_eval():
            found = _adopt(variable, owner)
        _adopted[id(variable)] = found
        weakref.finalize(variable, _adopted.pop, id(variable), None)
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
    if strategy is None:
        return AdoptedPlainVariable.adopt(request, keeper)
    kind = AdoptedMirroredVariable
    if request.aggregation is VariableAggregation.SUM:
        kind = AgreedVariable  # `write` makes the sum
    if _is_seed(variable):
        kind = _SeedVariable
    return kind.adopt(request, keeper, strategy)


def _aggregation(variable: keras.Variable) -> VariableAggregation:
    """As the variable says. Layers do not say it of their running averages, which are averaged."""
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
    """Whether it is the state of a `keras.random.SeedGenerator`, which gives it this name."""
    return variable.name == "seed_generator_state"


@final
class _InKeras:
    """Keeps the array in the Keras variable, which is kept alive by its model."""

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
                f"A compiled function uses the Keras variable {self._path!r}, which is gone: its "
                "model was deleted, or replaced by another one. Make the function anew, or pass "
                "what changes as an argument."
            )
        return variable


@final
class _SeedVariable(AgreedVariable):
    """A seed and a count. The first replica draws what one device would, the others differ.

    Replicas read it with a seed of their own, and write it back without.
    """

    def _read(self, frame: Frame) -> jax.Array:
        return super()._read(frame) + self._own(frame)

    def _settle(self, frame: Frame, value: jax.Array) -> None:
        super()._settle(frame, value - self._own(frame))

    def _own(self, frame: Frame) -> jax.Array:
        """What is added for a replica: a multiple of a large odd number, so that seeds are far."""
        replica = frame.replica if self._in_replica(frame) else None
        number = 0 if replica is None else replica.replica_id_in_sync_group
        own = jnp.asarray(number, self.dtype) * jnp.asarray(0x9E3779B9, jnp.uint32)
        return jnp.stack([own.astype(self.dtype), jnp.zeros((), self.dtype)])
