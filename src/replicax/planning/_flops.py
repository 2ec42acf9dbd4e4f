"""The number of floating point operations of a program, counted in its jaxpr.

XLA's own count includes the body of a loop only once, however often it runs.
"""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

from replicax._jax_compat import jaxprs_within


def count_flops(jaxpr: Jaxpr | ClosedJaxpr) -> float:
    """Count the operations of matrix products and convolutions, in a replica and outside of it.

    The body of a `scan` counts as often as it runs, and that of a `while_loop` once, because its
    number of iterations is not known. Of the branches of a `cond`, the most expensive one counts.

    >>> import jax, jax.numpy as jnp
    >>> from replicax.planning._flops import count_flops
    >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> product = jax.make_jaxpr(lambda x: x @ x)(x)
    >>> count_flops(product)
    1024.0
    """
    return float(sum(_of_equation(equation) for equation in jaxpr.eqns))


def _of_equation(equation: Any) -> float:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2.0 * _size(equation.outvars[0]) * math.prod(left[i] for i in contracted)
    if name == "conv_general_dilated":
        # Each element of the result is a sum over a kernel, excluding its output channels.
        kernel = equation.invars[1].aval.shape
        channels = kernel[parameters["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _size(equation.outvars[0]) * math.prod(kernel) / channels
    inner = [count_flops(each) for each in jaxprs_within(parameters)]
    if name == "cond":
        return max(inner, default=0.0)
    return sum(inner) * (parameters["length"] if name == "scan" else 1)


def _size(variable: Any) -> int:
    return math.prod(variable.aval.shape)
