"""Derivatives with respect to variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from replicax import _bridges, _context, _nest
from replicax._describing import described
from replicax._typing import Nest
from replicax.errors import InvalidType
from replicax.variables._derivatives import value_and_gradients
from replicax.variables._state import Overlay
from replicax.variables._variable import Variable


def value_and_grad(
    fn: Callable[..., Any], variables: Nest, has_aux: bool = False
) -> Callable[..., tuple[Any, Nest]]:
    """Makes `fn` return its value and the gradients with respect to `variables`.

    In replica context the gradients are those of this replica alone. Variables that `fn` assigns
    to, such as running averages, are written once it has returned.

    Args:
      fn: Returns a scalar, or `(scalar, anything)` with `has_aux`. It reads the variables.
      variables: A variable or a nest of them; the gradients have the same structure.
      has_aux: Whether `fn` returns something besides the value.

    >>> import replicax as rx
    >>> w = rx.Variable(3.0)
    >>> value, gradient = rx.value_and_grad(lambda x: x * w**2, w)(2.0)
    >>> float(value), float(gradient)
    (18.0, 12.0)
    """
    given, structure = _nest.flatten(variables)
    leaves = [_bridges.variable_of(leaf) for leaf in given]
    for leaf in leaves:
        if not isinstance(leaf, Variable):
            raise InvalidType(
                f"Gradients are taken with respect to variables; got {described(leaf)}."
            )
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise InvalidType(
                f"Variable {leaf.name!r} has dtype {leaf.dtype}, which has no gradient. Leave it "
                "out of `variables`, or give it a float dtype."
            )
    distinct = list(dict.fromkeys(leaves))
    code = _code_of(fn)

    def differentiated(*args: Any, **kwargs: Any) -> tuple[Any, Nest]:
        frame = _context.current()
        written: list[Variable] = []

        def function(values: list[jax.Array]) -> tuple[Any, Any]:
            overlay = Overlay(dict(zip(distinct, values, strict=True)), frame.overlay)
            with _context.entered(replace(frame, overlay=overlay)):
                result = _bridges.surrounded(fn)(*args, **kwargs)
            value, aux = result if has_aux else (result, None)
            writes = overlay.written()
            written[:] = writes
            return jnp.asarray(value), (aux, list(writes.values()))

        inputs = [variable.value for variable in distinct]
        (value, (aux, new_values)), gradients = value_and_gradients(function, code, inputs)
        for variable, new_value in zip(written, new_values, strict=True):
            variable.settle(new_value)
        by_variable = dict(zip(distinct, gradients, strict=True))
        nest = jax.tree.unflatten(structure, [by_variable[leaf] for leaf in leaves])
        return ((value, aux) if has_aux else value), nest

    return differentiated


def grad(fn: Callable[..., Any], variables: Nest, has_aux: bool = False) -> Callable[..., Any]:
    """Like `value_and_grad`, but returns the gradients only, or `(gradients, aux)`.

    >>> import replicax as rx
    >>> w = rx.Variable(3.0)
    >>> float(rx.grad(lambda: w**2, w)())
    6.0
    """
    both = value_and_grad(fn, variables, has_aux)

    def differentiated(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return differentiated


def _code_of(fn: Callable[..., Any]) -> Any:
    """What stands for `fn` from one call to the next, although it may be another closure then."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", type(fn))
