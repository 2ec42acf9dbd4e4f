"""The numbers that variables begin with, made of those of others with few compilations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal, jaxpr_as_fun

from replicax._jax_compat import without_constants
from replicax._typing import Nest


def computed_at_once(make: Callable[..., Nest], values: Sequence[jax.Array]) -> Nest:
    """Return `make(*values)`, a nest of arrays, by at most one program; also while tracing.

    Called as it is, it would compile one program per shape: 25 ms for the zeros of each, where an
    optimizer has two or three slots per variable. Arrays of one number are made by NumPy instead,
    and what is left is compiled together.
    """
    # Without their shardings, which JAX would compare with the mesh of a program that is traced.
    shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
    tracers: list[weakref.ref[Any]] = []

    def traced(*arguments: Any) -> Nest:
        tracers.extend(map(weakref.ref, arguments))
        return make(*arguments)

    try:
        closed, nest = jax.make_jaxpr(traced, return_shape=True)(*shapes)
    except Exception:  # it looks at the numbers, say; should it fail, it does so again
        closed = nest = None
    if closed is None or any(tracer() is not None for tracer in tracers):  # which it has kept
        with jax.ensure_compile_time_eval():
            return make(*values)
    jaxpr = without_constants(closed)
    # Together: in JAX 0.12, the inputs of a jaxpr without its constants begin with theirs.
    inputs = (*jaxpr.constvars, *jaxpr.invars)
    known: dict[Any, Any] = {
        **dict(zip(inputs, (*closed.consts, *values), strict=True)),
        **_of_one_number(jaxpr),
    }
    outputs: list[Any] = jaxpr.outvars
    results = [_literal(each) if isinstance(each, Literal) else known.get(each) for each in outputs]
    computed = [index for index, result in enumerate(results) if result is None]
    with jax.ensure_compile_time_eval():
        if computed:
            function = jaxpr_as_fun(closed)
            arrays = jax.jit(lambda *values: [function(*values)[i] for i in computed])(*values)
            for index, array in zip(computed, arrays, strict=True):
                results[index] = array
        placed = [_placed(result, values) for result in results]
        return jax.tree.unflatten(jax.tree.structure(nest), placed)


def _placed(array: Any, values: Sequence[jax.Array]) -> jax.Array:
    """Return an array, laid out as the value that it has the shape of: it may be in parts."""
    alike = (value.sharding for value in values if value.shape == array.shape)
    return jax.device_put(array, next(alike, None)) if isinstance(array, np.ndarray) else array


def _of_one_number(jaxpr: Jaxpr) -> dict[Any, np.ndarray]:
    """Return what the jaxpr makes of one number each, such as zeros."""
    found: dict[Any, np.ndarray] = {}
    for equation in jaxpr.eqns:
        operands: list[Any] = equation.invars
        if equation.primitive.name == "broadcast_in_dim" and isinstance(operands[0], Literal):
            result: Any = equation.outvars[0]
            if len(operands) == 1 and np.ndim(operands[0].val) == 0:
                # A view of the number, which takes no memory.
                number = np.asarray(operands[0].val, result.aval.dtype)
                found[result] = np.broadcast_to(number, result.aval.shape)
    return found


def _literal(variable: Any) -> np.ndarray:
    return np.asarray(variable.val, variable.aval.dtype)
