"""`rx.variables`: the variables of a nest."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import numpy as np

from replicax import _bridges, _nest
from replicax._typing import Nest
from replicax.errors import InvalidType
from replicax.values import DistributedValues
from replicax.variables._variable import Variable

_NO_VARIABLES = (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, DistributedValues)
_PLAIN = (bool, int, float, complex, str, bytes)


@runtime_checkable
class _HasVariables(Protocol):
    """An object that has variables, such as an optimizer, a metric or a Keras model."""

    @property
    def variables(self) -> Nest: ...


def variables(nest: Nest) -> list[Variable]:
    """Return the variables of a nest, in order, without duplicates.

    To JAX, a variable is its value, so `jax.tree.leaves` of a nest gives arrays.

    Args:
      nest: A nest of variables and of objects that have some: optimizers, metrics, Keras models,
        layers and variables, and objects of your own with an attribute `variables`, which is
        another nest. Arrays and numbers have none.

    >>> import optax, replicax as rx
    >>> model = {"dense": {"kernel": rx.Variable([[1.0]], name="kernel")}}
    >>> model["tied"] = model["dense"]["kernel"]
    >>> optimizer, loss = rx.Optimizer(optax.sgd(0.1)), rx.metrics.Mean("loss")
    >>> [variable.name for variable in rx.variables([model, optimizer, loss])]
    ['kernel', 'Optimizer/iterations', 'loss/total', 'loss/count']
    """
    _bridges.load()
    found: dict[Variable, None] = {}  # a set that keeps the order
    _collect(nest, "", found)
    return list(found)


def _collect(nest: Nest, place: str, found: dict[Variable, None]) -> None:
    for path, leaf in _nest.flatten_with_paths(nest, keep_opaque=True, everything=True)[0]:
        variable = _bridges.variable_of(leaf)
        if isinstance(variable, Variable):
            found[variable] = None
        elif isinstance(leaf, _HasVariables) and not callable(leaf.variables):
            _collect(leaf.variables, f"{place}{path}.variables", found)
        elif not isinstance(leaf, (*_NO_VARIABLES, *_PLAIN)):
            raise InvalidType(
                f"`rx.variables` does not know which variables a "
                f"{type(leaf).__module__}.{type(leaf).__qualname__} has"
                f"{f', at {place}{path}' if place + path else ''}. Give it an attribute "
                "`variables`, or pass its variables in a list or a dictionary; those of an NNX "
                "module are in `nnx.state(module)`."
            )
