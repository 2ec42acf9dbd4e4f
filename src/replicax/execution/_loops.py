"""Loops over stacked weights that gather one layer at a time.

Models with many layers of one kind stack their weights and go through them with `lax.scan`. If a
stack were gathered before the loop, all layers would be whole at once. So the loop takes this
replica's part of the stack and gathers each layer when it reaches it; and where only a part of the
sum of a stacked gradient is wanted, every round sums its layer and keeps its part of that sum.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var, jaxpr_as_fun

from replicax._jax_compat import apply_equation, closed_jaxpr, has_side_effects, scan_sizes
from replicax.variables import Division, part_of_sum, replicax_gather

# The operations that may lie between the loop and the sum of a gradient: they work slice by slice.
_SLICE_BY_SLICE = ("convert_element_type", "name")


@final
@dataclass(frozen=True, slots=True)
class StackedSum:
    """A sum over the replicas of a result that a loop stacks.

    Args:
      loop: The loop.
      result: The index of its result that is summed.
      between: The equations between the result and the sum, from the first to the last.
      division: How the sum is divided.
    """

    loop: JaxprEqn
    result: int
    between: tuple[JaxprEqn, ...]
    division: Division


def stacked_sum(
    atom: Literal | Var, division: Division, made_by: Mapping[Var, JaxprEqn]
) -> StackedSum | None:
    """Return the sum of `atom` as that of a loop's stacked result, or None if it is not one."""
    between: list[JaxprEqn] = []
    while not isinstance(atom, Literal) and division.axis > 0:
        equation = made_by.get(atom)
        if equation is None:
            break
        if goes_in_rounds(equation):
            result = equation.outvars.index(atom)
            if result < scan_sizes(equation.params)[1]:  # it is carried
                break
            return StackedSum(equation, result, tuple(reversed(between)), division)
        if equation.primitive.name not in _SLICE_BY_SLICE:
            break
        between.append(equation)
        (atom,) = equation.invars
    return None


def goes_in_rounds(equation: JaxprEqn) -> bool:
    """Tell whether an equation is a loop that may be changed."""
    return equation.primitive.name == "scan" and not has_side_effects(equation)


def divisions_of_stacks(
    equation: JaxprEqn, available: Mapping[Var, Division]
) -> tuple[Division | None, ...]:
    """Return, for each operand of a loop, the division by which it is taken, or None if whole.

    Args:
      equation: The loop.
      available: The values that are available in parts. A loop takes parts of those that it scans
        over and that are divided within each slice.
    """
    first = sum(scan_sizes(equation.params))
    found: list[Division | None] = []
    for place, atom in enumerate(equation.invars):
        division = None if isinstance(atom, Literal) else available.get(atom)
        found.append(division if place >= first and division and division.axis else None)
    return tuple(found)


def computed_in_rounds(
    equation: JaxprEqn,
    operands: Sequence[Any],
    divisions: Sequence[Division | None],
    wanted: Container[Var],
    sums: Sequence[StackedSum],
    *,
    scatters: bool,
) -> tuple[dict[Var, jax.Array], list[jax.Array]]:
    """Compute a loop; return the results that are `wanted`, and the parts of `sums`."""
    num_constants, num_carried = scan_sizes(equation.params)
    first = num_constants + num_carried
    body: Callable[..., Any] = jaxpr_as_fun(closed_jaxpr(equation.params["jaxpr"]))
    carried_out, stacked_out = equation.outvars[:num_carried], equation.outvars[num_carried:]

    def one_round(carried: list[jax.Array], slices: list[jax.Array]) -> tuple[Any, Any]:
        whole = [
            each if division is None else replicax_gather(each, _within(division))
            for each, division in zip(slices, divisions[first:], strict=True)
        ]
        results = body(*operands[:num_constants], *carried, *whole)
        kept = {
            out: result
            for out, result in zip(stacked_out, results[num_carried:], strict=True)
            if out in wanted
        }
        parts = []
        for each in sums:
            value = results[each.result]
            for step in each.between:
                (value,) = apply_equation(step, [value])
            parts.append(part_of_sum(value, _within(each.division), scatters=scatters))
        return results[:num_carried], (list(kept.values()), parts)

    carried, (kept, parts) = jax.lax.scan(
        one_round,
        [jnp.asarray(each) for each in operands[num_constants:first]],
        [jnp.asarray(each) for each in operands[first:]],
        length=equation.params["length"],
        reverse=equation.params["reverse"],
        unroll=equation.params["unroll"],
    )
    outs = [*carried_out, *(out for out in stacked_out if out in wanted)]
    return dict(zip(outs, [*carried, *kept], strict=True)), parts


def _within(division: Division) -> Division:
    """Return how a slice of a stack is divided."""
    return replace(division, axis=division.axis - 1)
