"""The creation of variables: the user's request, and the strategy that serves it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from replicax import _context
from replicax._context import Frame
from replicax._enums import VariableAggregation, VariableSynchronization
from replicax._jax_compat import is_tracing, without_mesh
from replicax.errors import InvalidArgument, InvalidType

if TYPE_CHECKING:
    from replicax._typing import StrategyLike
    from replicax.variables._variable import Variable


@dataclass(frozen=True, slots=True)
class VariableRequest:
    """A user's request, from which a placement makes a variable."""

    initial_value: Any
    trainable: bool
    name: str
    dtype: Any
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    constraint: Callable[[jax.Array], Any] | None = None
    partition: tuple[int, ...] | None = None  # parts per dimension, over the logical devices

    def initial_array(self) -> jax.Array:
        """Return the initial value; call it if it is a callable."""
        array = self.initial_array_or_tracer()
        if isinstance(array, Tracer):
            raise InvalidType(
                f"The initial value of variable {self.name!r} is a tracer, and would not outlive "
                "the tracing. Give it numbers, or create the variable outside of `rx.function`, "
                "`jax.jit` or `jax.grad`."
            )
        return array

    def initial_array_or_tracer(self) -> jax.Array:
        """Return the initial value, which is a tracer if the caller traces this call."""
        value = self.initial_value() if callable(self.initial_value) else self.initial_value
        array = jnp.asarray(value, dtype=self.dtype)
        # A Python number's type is weak, and would make the type of results depend on it.
        if getattr(array, "weak_type", False):
            array = jax.lax.convert_element_type(array, array.dtype)
        return array


@without_mesh
def create_variable(request: VariableRequest) -> Variable:
    """Create a variable with the current strategy; in replica context, one for all replicas."""
    from replicax.variables._kinds import PlainVariable  # a kind of Variable: it imports this file

    frame = _context.current()
    strategy = frame.strategy
    if strategy is None:
        with _context.entered(replace(frame, program=None)), jax.ensure_compile_time_eval():
            return PlainVariable.create(request, None, None)
    if frame.replica is None:
        return _placed(request, strategy, frame)

    if callable(request.initial_value):
        value = strategy.placement.initial(request.initial_value)  # in replica context
        request = replace(request, initial_value=value)
    label = f"Variable(name={request.name!r}, shape={np.shape(request.initial_value)})"
    return frame.replica.once(label, lambda: _placed(request, strategy, frame))


def _placed(request: VariableRequest, strategy: StrategyLike, frame: Frame) -> Variable:
    """Create the strategy's variable; refuse requests that would fail with several replicas."""
    now = replace(_context.current(), program=None)
    # A variable is made when it is asked for, even while a program is traced. Elsewhere JAX is left
    # alone, or it would not trace the function that makes the initial value of a variable in parts.
    at_once = jax.ensure_compile_time_eval() if is_tracing() else nullcontext()
    with _context.entered(now), at_once:
        return _placed_now(request, strategy, frame)


def _placed_now(request: VariableRequest, strategy: StrategyLike, frame: Frame) -> Variable:
    if request.synchronization is VariableSynchronization.NONE:
        raise InvalidArgument(
            f"Variable {request.name!r} asks for `synchronization=NONE`, but a strategy keeps its "
            "variables in sync. Use AUTO, ON_WRITE or ON_READ."
        )
    on_read = request.synchronization is VariableSynchronization.ON_READ
    if on_read and frame.partition is not None:
        raise InvalidArgument(
            f"The ON_READ variable {request.name!r} cannot be divided over logical devices. Create "
            "it outside of `partition`."
        )
    request = replace(request, partition=frame.partition)
    variable = strategy.placement.create(request, strategy, frame.colocate_with)
    if request.aggregation is VariableAggregation.SUM and variable.dtype == jnp.bool_:
        raise InvalidArgument(
            f"Variable {request.name!r} is a truth value and has `aggregation=SUM`, but a sum of "
            "truth values is a count. Use ONLY_FIRST_REPLICA, or an integer dtype."
        )
    mean = request.aggregation is VariableAggregation.MEAN
    if mean and not jnp.issubdtype(variable.dtype, jnp.inexact):
        raise InvalidArgument(
            f"Variable {request.name!r} has dtype {variable.dtype} and `aggregation=MEAN`, but a "
            "mean of whole numbers is fractional. Use SUM or ONLY_FIRST_REPLICA, or a float dtype."
        )
    return variable
