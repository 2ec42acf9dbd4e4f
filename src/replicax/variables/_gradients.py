"""Derivatives with respect to variables."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp

from replicax import _bridges, _context, _nest
from replicax._describing import described
from replicax._typing import Nest
from replicax.errors import InvalidArgument, InvalidType
from replicax.variables._gradient_programs import value_and_gradients
from replicax.variables._state import Overlay
from replicax.variables._variable import Variable, write_back

P = ParamSpec("P")
Value = TypeVar("Value")
Aux = TypeVar("Aux")
Key = TypeVar("Key")


# The gradients of variables in common containers are typed; those of other nests are not.
@overload
def value_and_grad(
    fn: Callable[P, Value], variables: Variable, has_aux: bool = False
) -> Callable[P, tuple[Value, jax.Array]]: ...
@overload
def value_and_grad(
    fn: Callable[P, Value], variables: list[Variable], has_aux: bool = False
) -> Callable[P, tuple[Value, list[jax.Array]]]: ...
@overload
def value_and_grad(
    fn: Callable[P, Value], variables: tuple[Variable, ...], has_aux: bool = False
) -> Callable[P, tuple[Value, tuple[jax.Array, ...]]]: ...
@overload
def value_and_grad(
    fn: Callable[P, Value], variables: dict[Key, Variable], has_aux: bool = False
) -> Callable[P, tuple[Value, dict[Key, jax.Array]]]: ...
@overload
def value_and_grad(
    fn: Callable[P, Value], variables: Nest, has_aux: bool = False
) -> Callable[P, tuple[Value, Nest]]: ...
def value_and_grad(
    fn: Callable[..., object], variables: Nest, has_aux: bool = False
) -> Callable[..., tuple[Any, Nest]]:
    """Transform `fn` so that it returns its value and the gradients with respect to `variables`.

    In replica context the gradients are those of this replica alone. Variables that `fn` assigns
    to, such as running averages, are written once it has returned.

    Args:
      fn: Returns a scalar, or `(scalar, anything)` with `has_aux`. It reads the variables.
      variables: A variable or a nest of them; the gradients have the same structure, with None for
        settings of objects, such as the activation functions of an Equinox module. It can also be
        a function that returns them, which is called after `fn`, since `fn` may create variables.
      has_aux: Whether `fn` returns something in addition to the value.

    >>> import replicax as rx
    >>> w = rx.Variable(3.0)
    >>> value, gradient = rx.value_and_grad(lambda x: x * w**2, w)(2.0)
    >>> float(value), float(gradient)
    (18.0, 12.0)
    """
    ask = variables if is_function(variables) else None
    known = _Differentiated(variables) if ask is None else None
    code = _code_of(fn)

    def differentiated(*args: object, **kwargs: object) -> tuple[Any, Nest]:
        current = known or _Differentiated(_asked_together(variables), may_be_empty=True)
        for _ in range(_ATTEMPTS):
            try:
                return _differentiate(fn, code, current, ask, has_aux, args, kwargs)
            except _MoreVariables as more:  # when a model is built, and rarely afterwards
                current = more.variables
        raise InvalidArgument(
            f"The function to be differentiated creates variables whenever it is called: "
            f"{len(current.distinct)} after {_ATTEMPTS} calls. Create them once, and keep them."
        )

    return differentiated


# The first call builds a model, in which a layer may not be built until another one is.
_ATTEMPTS = 4


def is_function(variables: object) -> bool:
    """Tell whether `variables` is a function that returns variables rather than a nest of them."""
    return isinstance(variables, (types.FunctionType, types.MethodType, functools.partial))


def _asked_together(ask: Callable[[], Nest]) -> Nest:
    """Ask for variables; all replicas begin with the first one's, or they would not meet again."""
    replica = _context.current().replica
    return ask() if replica is None else replica.once("asking for variables", ask)


class _Differentiated:
    """The variables that gradients are taken with respect to, and the nest they were given in."""

    def __init__(self, nest: Nest, *, may_be_empty: bool = False) -> None:
        given, self.structure = _nest.flatten(without_settings(nest), everything=True)
        self.leaves: list[Variable] = [_bridges.variable_of(leaf) for leaf in given]
        if not self.leaves and not may_be_empty:
            raise InvalidArgument(
                "Gradients are taken with respect to variables, and there are none: the model has "
                "no variables yet. Build it first, or pass a function that is asked later: "
                "`rx.value_and_grad(loss, lambda: model.trainable_variables)`."
            )
        for leaf in self.leaves:
            if not isinstance(leaf, Variable):
                raise InvalidType(
                    f"Gradients are taken with respect to variables; got {described(leaf)}."
                )
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise InvalidType(
                    f"Variable {leaf.name!r} has dtype {leaf.dtype}, which has no gradient. Leave "
                    "it out of `variables`, or give it a float dtype."
                )
        self.distinct = list(dict.fromkeys(self.leaves))

    def nest_of(self, gradients: Sequence[jax.Array]) -> Nest:
        """Return the gradients of the distinct variables in the nest that these were given in."""
        by_variable = dict(zip(self.distinct, gradients, strict=True))
        return jax.tree.unflatten(self.structure, [by_variable[leaf] for leaf in self.leaves])


def without_settings(nest: Nest) -> Nest:
    """Return a nest of variables with None for the settings of objects in it.

    A setting is an attribute of an object, such as an Equinox module, that is neither an array nor
    a variable. Anything else in the place of a variable is a mistake, and is left there.
    """
    if all(isinstance(leaf, Variable) for leaf in _nest.leaves(nest)):
        return nest
    found, structure = _nest.flatten_with_keys(nest)
    return jax.tree.unflatten(
        structure, [None if _is_setting(path, leaf) else leaf for path, leaf in found]
    )


def _is_setting(path: Sequence[object], leaf: object) -> bool:
    if hasattr(leaf, "dtype") or isinstance(_bridges.variable_of(leaf), Variable):
        return False
    return any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)


class _MoreVariables(BaseException):
    """A signal that a function has created variables whose gradients are wanted.

    It is not an `Exception`, which could be mistaken for one of the function's own.
    """

    def __init__(self, variables: _Differentiated) -> None:
        super().__init__()
        self.variables = variables


def _differentiate(
    fn: Callable[..., object],
    code: object,
    variables: _Differentiated,
    ask: Callable[[], Nest] | None,
    has_aux: bool,
    args: tuple[object, ...],
    kwargs: dict[str, Nest],
) -> tuple[Any, Nest]:
    frame = _context.current()
    written: list[Variable] = []

    def function(values: list[jax.Array]) -> tuple[Any, Any]:
        overlay = Overlay(dict(zip(variables.distinct, values, strict=True)), frame.overlay)
        with _context.entered(replace(frame, overlay=overlay)):
            result = _bridges.surrounded(fn)(*args, **kwargs)
        if ask is not None:
            now = _Differentiated(ask())
            if set(map(id, now.distinct)) != set(map(id, variables.distinct)):
                raise _MoreVariables(now)
        value, aux = result if has_aux else (result, None)
        writes = overlay.written()
        written[:] = writes
        return jnp.asarray(value), (aux, list(writes.values()))

    inputs = [variable.value for variable in variables.distinct]
    if frame.program is not None and frame.program.skips_computing():
        (value, (aux, new_values)), gradients = function(inputs), list(map(jnp.zeros_like, inputs))
    else:
        (value, (aux, new_values)), gradients = value_and_gradients(function, code, inputs)
    for variable, new_value in zip(written, new_values, strict=True):
        write_back(variable, new_value)
    return ((value, aux) if has_aux else value), variables.nest_of(gradients)


@overload
def grad(
    fn: Callable[P, tuple[object, Aux]], variables: Variable, has_aux: Literal[True]
) -> Callable[P, tuple[jax.Array, Aux]]: ...
@overload
def grad(
    fn: Callable[P, tuple[object, Aux]], variables: Nest, has_aux: Literal[True]
) -> Callable[P, tuple[Nest, Aux]]: ...
@overload
def grad(
    fn: Callable[P, object], variables: Variable, has_aux: Literal[False] = False
) -> Callable[P, jax.Array]: ...
@overload
def grad(
    fn: Callable[P, object], variables: list[Variable], has_aux: Literal[False] = False
) -> Callable[P, list[jax.Array]]: ...
@overload
def grad(
    fn: Callable[P, object], variables: tuple[Variable, ...], has_aux: Literal[False] = False
) -> Callable[P, tuple[jax.Array, ...]]: ...
@overload
def grad(
    fn: Callable[P, object], variables: dict[Key, Variable], has_aux: Literal[False] = False
) -> Callable[P, dict[Key, jax.Array]]: ...
@overload
def grad(fn: Callable[P, object], variables: Nest, has_aux: bool = False) -> Callable[P, Nest]: ...
def grad(fn: Callable[..., object], variables: Nest, has_aux: bool = False) -> Callable[..., Any]:
    """Make `fn` return only the gradients, or `(gradients, aux)`; otherwise like `value_and_grad`.

    >>> import replicax as rx
    >>> w = rx.Variable(3.0)
    >>> float(rx.grad(lambda: w**2, w)())
    6.0
    """
    both = value_and_grad(fn, variables, has_aux)

    def differentiated(*args: object, **kwargs: object) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return differentiated


def _code_of(fn: Callable[..., object]) -> object:
    """Return an identity of `fn` that lasts between calls, even if each has a new closure."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", type(fn))
