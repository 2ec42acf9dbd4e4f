"""The parts of operands that an equation needs for a part of its result."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
from jax.extend.core import JaxprEqn, Literal

from replicax._jax_compat import apply_equation
from replicax.variables import Division

# fmt: off
_ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "copy_p",
    "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1",
    "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "or",
    "population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh",
    "sqrt", "square", "sub", "tan", "tanh", "xor",
})
# fmt: on
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod")


@final
@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for computing a part of an equation's result.

    Args:
      operands: The division by which a part of each operand is needed; None if it is needed whole.
      apply: Computes the part.
    """

    operands: tuple[Division | None, ...]
    apply: Callable[[Sequence[jax.Array]], jax.Array]


def rule_for(equation: JaxprEqn, division: Division) -> Rule | None:
    """Return the rule that computes a part of the only result from parts, or None if none does."""
    if len(equation.outvars) != 1:
        return None
    name, shape = equation.primitive.name, _shape(equation.outvars[0])
    operands = [_shape(atom) for atom in equation.invars]
    if name in _ELEMENTWISE:
        if any(each not in (shape, ()) for each in operands):
            return None
        divisions = tuple(division if each == shape else None for each in operands)
        return Rule(divisions, lambda values: apply_equation(equation, values)[0])
    if len(operands) != 1:
        return None
    part, axis = division.part_of(shape), division.axis
    parameters = equation.params
    match name:
        case "broadcast_in_dim":
            dimensions = parameters["broadcast_dimensions"]
            place = dimensions.index(axis) if axis in dimensions else None
            whole = place is None or operands[0][place] != division.size
            return Rule(
                (None if whole else replace(division, axis=place),),
                lambda values: jax.lax.broadcast_in_dim(values[0], part, dimensions),
            )
        case "transpose":
            return _of_axis(equation, division, parameters["permutation"][axis])
        case "squeeze":
            return _of_axis(
                equation, division, _without(operands[0], parameters["dimensions"])[axis]
            )
        case _ if name in _REDUCTIONS:
            kept = _without(operands[0], parameters["axes"])
            return _of_axis(equation, division, kept[axis])
        case "reshape" if parameters["dimensions"] is None:
            place = _place_before(operands[0], shape, axis)
            if place is None:
                return None
            return Rule(
                (replace(division, axis=place),), lambda values: jax.lax.reshape(values[0], part)
            )
    return None


def is_filling(equation: JaxprEqn, fillings: Container[object]) -> bool:
    """Tell whether the result is an array filled with one number, as the `fillings` are."""
    single = (isinstance(x, Literal) or not _shape(x) or x in fillings for x in equation.invars)
    name = equation.primitive.name
    return (name == "broadcast_in_dim" or name in _ELEMENTWISE) and all(single)


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _of_axis(equation: JaxprEqn, division: Division, axis: int) -> Rule:
    return Rule((replace(division, axis=axis),), lambda values: apply_equation(equation, values)[0])


def _without(shape: Sequence[int], axes: Sequence[int]) -> list[int]:
    return [axis for axis in range(len(shape)) if axis not in axes]


def _place_before(before: Sequence[int], after: Sequence[int], axis: int) -> int | None:
    """Return the dimension that becomes `axis`, if a reshape only adds or removes sizes of 1."""
    kept = [place for place, size in enumerate(before) if size != 1]
    now = [place for place, size in enumerate(after) if size != 1]
    if [before[place] for place in kept] != [after[place] for place in now]:
        return None
    return kept[now.index(axis)]
