"""Nests of variables: parameters as in JAX programs, kept by a strategy."""

from __future__ import annotations

from typing import overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyEntry

from replicax import _context, _nest
from replicax._describing import described
from replicax._enums import (
    AggregationLike,
    SynchronizationLike,
    VariableAggregation,
    VariableSynchronization,
)
from replicax._typing import Nest, Values
from replicax.errors import InvalidType, ShapeMismatch, StructureMismatch
from replicax.variables._state import all_or_nothing
from replicax.variables._variable import Variable

_ARRAYS = (jax.Array, np.ndarray, np.generic)


def make_variables(
    nest: Nest,
    *,
    trainable: bool | None = None,
    name: str = "",
    synchronization: SynchronizationLike = VariableSynchronization.AUTO,
    aggregation: AggregationLike = VariableAggregation.NONE,
) -> Nest:
    """Create a variable for every array of a nest, in the current scope.

    Args:
      nest: A dictionary, a dataclass, an Equinox module, a Flax `TrainState` or another pytree.
        Leaves that are not arrays, such as activation functions and Python numbers, are left
        unchanged.
      trainable: Applies to all variables; by default, those of floating-point arrays are trainable.
      name: The prefix of the variables' names. The rest is the place in the nest.
      synchronization: As for `rx.Variable`.
      aggregation: As for `rx.Variable`.

    Returns:
      A nest of the same structure with variables.

    >>> import jax.numpy as jnp, replicax as rx
    >>> params = rx.make_variables({"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}})
    >>> params["dense"]["kernel"].name, params["dense"]["kernel"].shape
    ('dense/kernel', (2, 3))
    """
    found, structure = _nest.flatten_with_keys(nest)
    variables = [leaf for _, leaf in found if isinstance(leaf, Variable)]
    if variables:
        raise InvalidType(
            "`rx.make_variables` makes variables of arrays; the nest has variables already, such "
            f"as {variables[0].name!r}. Give it `rx.read(nest)` for variables of their own."
        )

    def made(path: tuple[KeyEntry, ...], leaf: object) -> object:
        if not isinstance(leaf, _ARRAYS):
            return leaf
        place = jax.tree_util.keystr(path, simple=True, separator="/")
        inexact = bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
        return Variable(
            leaf,
            trainable=inexact if trainable is None else trainable,
            name="/".join(part for part in (name, place) if part) or None,
            synchronization=synchronization,
            aggregation=aggregation,
        )

    return jax.tree.unflatten(structure, [made(path, leaf) for path, leaf in found])


@overload
def read(nest: Variable) -> jax.Array: ...
@overload
def read(nest: Values) -> Values: ...
def read(nest: Nest) -> Nest:
    """Return a nest with the values of its variables; other leaves are unchanged.

    In a function given to `run` these are the values that the replica sees.

    >>> import replicax as rx
    >>> rx.read({"name": "adam", "step": rx.Variable(3)})
    {'name': 'adam', 'step': Array(3, dtype=int32)}
    """
    return _nest.transform(
        lambda leaf: leaf.value if isinstance(leaf, Variable) else leaf, nest, everything=True
    )


def assign(nest: Nest, values: Nest) -> None:
    """Assign new values to the variables of a nest, all of them or none.

    In a function given to `run`, the variables need an aggregation, as for `Variable.assign`.

    Args:
      nest: A nest of variables. Leaves that are not variables are left alone.
      values: A nest of the same structure, of arrays or of variables, which are read.

    >>> import jax.numpy as jnp, replicax as rx
    >>> params = {"w": rx.Variable([1.0, 2.0])}
    >>> rx.assign(params, {"w": jnp.zeros(2)})
    >>> rx.read(params)
    {'w': Array([0., 0.], dtype=float32)}
    """
    targets, structure = _nest.flatten(nest, everything=True)
    given, other = _nest.flatten(values, everything=True)
    if structure != other:
        raise StructureMismatch(
            f"`rx.assign` got variables in the nest {structure}, and values in the nest {other}. "
            "Give one value per variable, in the same nest."
        )
    pairs = [
        (target, value.value if isinstance(value, Variable) else value)
        for target, value in zip(targets, given, strict=True)
        if isinstance(target, Variable)
    ]
    for variable, value in pairs:
        if np.shape(value) != variable.shape:
            raise ShapeMismatch(
                f"`rx.assign` got {described(value)} for variable {variable.name!r} of shape "
                f"{variable.shape}. Give every variable a value of its own shape."
            )
    with all_or_nothing(_context.current()) as frame, _context.entered(frame):
        for variable, value in pairs:
            variable.assign(value)
