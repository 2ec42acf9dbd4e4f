"""Small sums over the replicas that are sent together, wherever in the code they are.

Between workers, each all-reduce takes a round trip, however small it is. XLA:CPU joins independent
ones into one with several operands, but sends these over the network one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from replicax._jax_compat import apply_equation, without_constants
from replicax.collectives import PackRules, in_packs, packed
from replicax.execution._varying import Level, levels, names_axis, sums_over_replicas
from replicax.topology import REPLICA_AXIS


@dataclass
class _Group:
    """Sums that are computed in the place of the first of them, and their prerequisites."""

    sums: list[int]  # numbers of equations
    results: list[int] = field(default_factory=list)  # results that are summed as well
    earlier: set[int] = field(default_factory=set)  # equations


@final
class JoinedSums:
    """The code of a replica, changed so that sums over the replicas are joined where possible.

    A call returns the outputs, and then the sums of those that are numbered in `results`: single
    numbers that differ between the replicas, such as a loss, and that can join a sum that is
    computed anyway.

    Args:
      closed: The code.
      split: For each input, whether it differs between the replicas.
      count: How many of the outputs are results; the others are new states.
      rules: How large sums that are sent together may be.
    """

    def __init__(
        self, closed: ClosedJaxpr, split: Sequence[bool], count: int, rules: PackRules
    ) -> None:
        self._closed = closed
        self._jaxpr = without_constants(closed)
        self._rules = rules
        self._made_by = {
            variable: number
            for number, equation in enumerate(self._jaxpr.eqns)
            for variable in equation.outvars
        }
        varying: set[object] = set()

        def visit(equation: object, highest: Level, _: object) -> None:
            if highest is Level.VARYING:
                varying.add(id(equation))

        # In JAX 0.12, the inputs of a jaxpr without its constants begin with theirs.
        constants = [False] * (len(self._jaxpr.invars) - len(split))
        outputs = levels(self._jaxpr, [*constants, *split], REPLICA_AXIS, visit)
        sums = [
            number
            for number, equation in enumerate(self._jaxpr.eqns)
            # The sum of a value that does not vary has the level SAME, and would lose it if joined.
            if id(equation) in varying and self._is_sum(equation)
        ]
        single = [
            number
            for number, variable in enumerate(self._jaxpr.outvars[:count])
            if outputs[number] is Level.VARYING and _shape(variable) == (1,)
        ]
        self._groups = self._find_groups(sums, single)
        self.results = sorted(number for group in self._groups for number in group.results)

    @property
    def any(self) -> bool:
        """True if there is something to join."""
        return any(len(group.sums) + len(group.results) > 1 for group in self._groups)

    def __call__(self, *arguments: jax.Array) -> list[jax.Array]:
        jaxpr = self._jaxpr
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        values: dict[Var, jax.Array] = dict(
            zip(inputs, (*self._closed.consts, *arguments), strict=True)
        )
        totals: dict[int, jax.Array] = {}
        done: set[int] = set()

        def read(variable: Literal | Var) -> jax.Array:
            return variable.val if isinstance(variable, Literal) else values[variable]

        def compute(number: int) -> None:
            if number not in done:
                equation = jaxpr.eqns[number]
                results = apply_equation(equation, [read(each) for each in equation.invars])
                values.update(zip(equation.outvars, results, strict=True))
                done.add(number)

        groups = {group.sums[0]: group for group in self._groups}
        for number in range(len(jaxpr.eqns)):
            group = groups.get(number)
            if group is not None:
                for earlier in sorted(group.earlier):
                    compute(earlier)
                together: list[Any] = [jaxpr.eqns[each].invars[0] for each in group.sums]
                together += [jaxpr.outvars[each] for each in group.results]
                sums = self._sums(together, read)
                asked, besides = sums[: len(group.sums)], sums[len(group.sums) :]
                for each, total in zip(group.sums, asked, strict=True):
                    values[jaxpr.eqns[each].outvars[0]] = total
                totals.update(zip(group.results, besides, strict=True))
                done.update(group.sums)
            compute(number)
        outputs = [read(variable) for variable in jaxpr.outvars]
        return [*outputs, *(totals[number] for number in self.results)]

    def _sums(
        self, operands: Sequence[Literal | Var], read: Callable[[Literal | Var], jax.Array]
    ) -> list[jax.Array]:
        """Return the sums of values over the replicas, with as few all-reduces as possible."""
        arrays = [jnp.asarray(read(each)) for each in operands]
        largest = max(range(len(arrays)), key=lambda number: arrays[number].nbytes)
        pieces = self._pieces(operands[largest])
        if pieces is None:
            return in_packs(_sum, arrays, self._rules)
        # The others are put into the pack from the start. If they were packed with it afterwards,
        # XLA:CPU would make one loop of both packings: 25 ms per step instead of 8 ms.
        dtype = arrays[largest].dtype
        joining = [n for n, each in enumerate(arrays) if n != largest and each.dtype == dtype]
        apart = [n for n, each in enumerate(arrays) if each.dtype != dtype]
        others = in_packs(_sum, [arrays[n] for n in apart], self._rules)
        sums = dict(zip(apart, others, strict=True))
        together = [*(jnp.asarray(read(each)) for each in pieces), *(arrays[n] for n in joining)]
        total, end = _sum(packed(together)), arrays[largest].size
        sums[largest] = jax.lax.slice(total, (0,), (end,))
        for number in joining:
            start, end = end, end + arrays[number].size
            part = jax.lax.slice(total, (start,), (end,))
            sums[number] = jax.lax.reshape(part, arrays[number].shape)
        return [sums[number] for number in range(len(arrays))]

    def _pieces(self, pack: Literal | Var) -> list[Any] | None:
        """Return the arrays that `packed` has put into a pack, or None if it is no pack."""
        if len(_shape(pack)) != 1:
            return None
        equation, end = self._equation_of(pack), _shape(pack)[0]
        if equation is not None and equation.primitive.name == "concatenate":
            return list(equation.invars)
        pieces: list[Any] = []
        while equation is not None and equation.primitive.name == "dynamic_update_slice":
            whole, piece, start = equation.invars
            end -= _shape(piece)[0]
            if not isinstance(start, Literal) or int(start.val) != end:
                return None
            pieces.insert(0, piece)
            equation = self._equation_of(whole)
        return pieces if pieces and end == 0 else None

    def _equation_of(self, atom: Literal | Var) -> JaxprEqn | None:
        number = None if isinstance(atom, Literal) else self._made_by.get(atom)
        return None if number is None else self._jaxpr.eqns[number]

    def _is_sum(self, equation: JaxprEqn) -> bool:
        return (
            sums_over_replicas(equation)
            and len(equation.invars) == 1
            and isinstance(equation.invars[0], Var)
            and _bytes(equation.invars[0]) <= self._rules.small
        )

    def _find_groups(self, sums: Sequence[int], single: Sequence[int]) -> list[_Group]:
        groups = []
        left, wanted = list(sums), list(single)
        while left:
            group = _Group([left[0]])
            for number in left[1:]:
                self._add(group, group.sums, number, self._jaxpr.eqns[number].invars[0])
            kinds = {_dtype(self._jaxpr.eqns[number].invars[0]) for number in group.sums}
            for number in wanted:
                variable = self._jaxpr.outvars[number]
                if _dtype(variable) in kinds:
                    self._add(group, group.results, number, variable)
            left = [number for number in left if number not in group.sums]
            wanted = [number for number in wanted if number not in group.results]
            groups.append(group)
        return groups

    def _add(self, group: _Group, members: list[int], number: int, operand: Literal | Var) -> None:
        """Add a sum to a group, if its operand can be computed there."""
        needed = self._needed(operand, group.sums[0])
        if needed is not None:
            members.append(number)
            group.earlier |= needed

    def _needed(self, variable: Literal | Var, before: int) -> set[int] | None:
        """Return the equations after `before` that a value needs, or None if it needs `before`.

        The result is also None if one of them must not be computed earlier, because it has effects.
        """
        needed: set[int] = set()
        variables = [variable]
        while variables:
            atom = variables.pop()
            number = None if isinstance(atom, Literal) else self._made_by.get(atom)
            if number is None or number < before or number in needed:
                continue
            equation = self._jaxpr.eqns[number]
            if number == before or equation.effects or names_axis(equation, REPLICA_AXIS):
                return None
            needed.add(number)
            variables += equation.invars
        return needed


def _shape(variable: Any) -> tuple[int, ...]:
    return variable.aval.shape


def _dtype(variable: Any) -> Any:
    return variable.aval.dtype


def _bytes(variable: Any) -> int:
    return variable.aval.size * _dtype(variable).itemsize


def _sum(array: jax.Array) -> jax.Array:
    return jax.lax.psum(array, REPLICA_AXIS)
