"""Initial values of variables, computed from those of others with few compilations."""

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
    """Return `make(*values)`, a nest of arrays, using at most one program, even while tracing.

    A plain call would compile one program per shape: 25 ms for the zeros of each, and an optimizer
    has two or three slots per variable. Instead, NumPy makes arrays that are filled with one
    number, and the rest is compiled together.
    """
    # Shardings are left out: JAX would compare them with the mesh of a program being traced.
    shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
    tracers: list[weakref.ref[Any]] = []

    def traced(*arguments: object) -> Nest:
        tracers.extend(map(weakref.ref, arguments))
        return make(*arguments)

    try:
        closed, nest = jax.make_jaxpr(traced, return_shape=True)(*shapes)
    except Exception:  # it may look at numbers; a real error is raised again below
        closed = nest = None
    if closed is None or any(tracer() is not None for tracer in tracers):  # `make` kept one.
        with jax.ensure_compile_time_eval():
            return make(*values)
    jaxpr = without_constants(closed)
    # These go together because, in JAX 0.12, a jaxpr without its constants takes them as its first
    # inputs.
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
        return jax.tree.unflatten(jax.tree.structure(nest), _placed(results, values))


def _placed(arrays: Sequence[Any], values: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the arrays, with those of NumPy laid out like the value of the same shape.

    That value may be in parts. Arrays are put on the devices together, which takes a tenth of the
    time.
    """
    alike = {value.shape: value.sharding for value in reversed(values)}
    numbers = [index for index, array in enumerate(arrays) if isinstance(array, np.ndarray)]
    brought = jax.device_put(
        [arrays[index] for index in numbers],
        [alike.get(arrays[index].shape) for index in numbers],
    )
    found = dict(zip(numbers, brought, strict=True))
    return [found.get(index, array) for index, array in enumerate(arrays)]


def _of_one_number(jaxpr: Jaxpr) -> dict[Any, np.ndarray]:
    """Return the outputs that the jaxpr fills with a single number, such as zeros."""
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
