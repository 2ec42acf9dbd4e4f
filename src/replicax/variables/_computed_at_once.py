"""The numbers that variables begin with, made of those of others with few compilations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.errors import ConcretizationTypeError, TracerArrayConversionError
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
    try:
        closed, nest = jax.make_jaxpr(make, return_shape=True)(*shapes)
    except (ConcretizationTypeError, TracerArrayConversionError):  # it looks at the numbers
        with jax.ensure_compile_time_eval():
            return make(*values)
    jaxpr = without_constants(closed)
    known: dict[Any, Any] = {
        **dict(zip(jaxpr.constvars, closed.consts, strict=True)),
        **dict(zip(jaxpr.invars, values, strict=True)),
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
        return jax.tree.unflatten(jax.tree.structure(nest), jax.device_put(results))


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
