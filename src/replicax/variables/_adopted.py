"""Variables that stand for another library's: it keeps the array, but our rules apply."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from replicax import _context
from replicax._context import ContextKind
from replicax._enums import VariableAggregation
from replicax.variables._creation import VariableRequest
from replicax.variables._initial import begin_alike
from replicax.variables._kinds import ON_WRITE, UNSYNCHRONIZED, MirroredVariable, PlainVariable
from replicax.variables._storage import Keeper, OneDevice
from replicax.variables._synchronization import Synchronization
from replicax.variables._variable import Variable

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


def adopt(
    request: VariableRequest,
    keeper: Keeper,
    strategy: StrategyLike | None,
    synchronization: Synchronization = ON_WRITE,
) -> Variable:
    """Create a variable, of a strategy or of none, whose array another library keeps."""
    array = keeper.get()
    if strategy is None:
        storage = OneDevice(request.name, array.shape, None, keeper)
        return PlainVariable._made(request, None, storage, UNSYNCHRONIZED, array.dtype)
    storage = strategy.placement.storage_of_kept(request.name, strategy, array, keeper)
    if not strategy.topology.spans_processes or array.is_fully_addressable:
        # Like the strategy's own variables, it begins with the first worker's value.
        begin_alike(storage, strategy.topology, array, storage.state_of_copies)
    return MirroredVariable._made(request, strategy, storage, synchronization, array.dtype)


def write(variable: Variable, value: jax.Array) -> None:
    """Write to a variable for a library that gives the new value but not the increment.

    The replicas' increments are summed; but if all replicas write zeros, the sum starts over.
    """
    frame = _context.current()
    if (
        frame.kind is ContextKind.REPLICA
        and frame.replica is not None
        and frame.strategy is not None
        and variable.aggregation is VariableAggregation.SUM
    ):
        old = variable.value
        something = jnp.any(value != 0).astype(value.dtype)
        added, something = frame.replica.all_reduce("SUM", [value - old, something])
        value = jnp.where(something > 0, old + added, jnp.zeros_like(old))
    variable.assign(value)
