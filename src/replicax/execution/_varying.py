"""The values of a replica's code that differ between the replicas, read off its jaxpr.

A value varies if it depends on an input that varies, on the replica's number, or on the host. The
result of a reduction over the axis, which all replicas get, does not vary. The answer errs on one
side: a value reported not to vary is equal on all replicas, and one reported to vary may be equal
by chance.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from replicax._jax_compat import jaxprs_within, mapped_axes, scan_sizes
from replicax.topology import REPLICA_AXIS
from replicax.variables import gathers

# Collectives that give every replica the same result.
_SAME_FOR_ALL = frozenset(
    {"psum", "pmax", "pmin", "psum_invariant", "all_gather", "all_gather_invariant"}
)
# Primitives that run a jaxpr once, on all of their operands.
_CALLS = frozenset(
    {
        "checkpoint",
        "closed_call",
        "composite",
        "core_call",
        "custom_jvp_call",
        "custom_jvp_call_jaxpr",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "eval_jaxpr",
        "jit",
        "pjit",
        "remat",
        "remat2",
        "shard_map",
    }
)
# These name the axis but do not communicate.
_SILENT = frozenset({"axis_index", "pvary", "pcast"})
# Values from the host, or from a device's own state, may differ on every replica.
_FROM_OUTSIDE = ("callback", "infeed", "rng_uniform")

# The name of a value that was read as the state of a variable, unless that is in a ref, or that was
# computed from the parts of a variable.
STATE = "replicax.state"


class Level(enum.IntEnum):
    """The relation of a value to those of the other replicas; of two levels the higher prevails."""

    SAME = 0
    REDUCED = 1  # equal on all replicas, because a value that varied was reduced
    VARYING = 2


# A function of an equation, of the highest level of its operands, and of the equation whose
# condition may differ between the replicas and decides whether this one is computed, or None.
Visit = Callable[[JaxprEqn, Level, JaxprEqn | None], None]


def runs_in(program: Jaxpr | ClosedJaxpr) -> list[JaxprEqn]:
    """Return the equations that are a `run`: a `shard_map` over the replicas, at any depth."""
    runs = []
    for equation in program.eqns:
        if equation.primitive.name == "shard_map":
            if REPLICA_AXIS in mapped_axes(equation.params):
                runs.append(equation)
        else:
            runs += [run for jaxpr in jaxprs_within(equation.params) for run in runs_in(jaxpr)]
    return runs


def visit_run(run: JaxprEqn, visit: Visit) -> None:
    """Call `visit` with every equation of a run, as `levels` does."""
    split = [REPLICA_AXIS in jax.tree.leaves(tuple(spec)) for spec in run.params["in_specs"]]
    levels(run.params["jaxpr"], split, REPLICA_AXIS, visit)


def names_axis(equation: JaxprEqn, axis: str) -> bool:
    """Tell whether an equation names an axis, as a collective or `axis_index` does."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    return axis in (axes if isinstance(axes, (tuple, list)) else (axes,))


def communicates(equation: JaxprEqn) -> bool:
    """Tell whether an equation is a collective over the replicas."""
    return equation.primitive.name not in _SILENT and names_axis(equation, REPLICA_AXIS)


def sums_over_replicas(equation: JaxprEqn) -> bool:
    """Tell whether an equation is a sum over all replicas."""
    return (
        equation.primitive.name == "psum"
        and tuple(equation.params["axes"]) == (REPLICA_AXIS,)
        and equation.params["axis_index_groups"] is None
    )


def varying_outputs(
    jaxpr: Jaxpr | ClosedJaxpr, varying_inputs: Sequence[bool], axis: str
) -> list[bool]:
    """Tell for each output of a replica's jaxpr whether it may differ between the replicas.

    Args:
      jaxpr: The code of one replica, such as the body of a `shard_map`.
      varying_inputs: For each input, whether it differs, such as by being split over the replicas.
      axis: The name of the axis of the replicas.
    """
    return [level is Level.VARYING for level in levels(jaxpr, varying_inputs, axis)]


def levels(
    jaxpr: Jaxpr | ClosedJaxpr,
    varying_inputs: Sequence[bool],
    axis: str,
    visit: Visit | None = None,
) -> list[Level]:
    """Return the level of each output; `visit` is called with every equation.

    It is called several times for an equation in a loop, or in a jaxpr that is called more than
    once. The highest level counts.
    """
    given = [Level.VARYING if varies else Level.SAME for varies in varying_inputs]
    return _Flow(axis, visit).through(jaxpr, given, Level.SAME)[0]


@final
class _Flow:
    """The data flow of one jaxpr, and of those inside of it."""

    def __init__(self, axis: str, visit: Visit | None) -> None:
        self._axis = axis
        self._visit = visit
        self._parting: JaxprEqn | None = None  # the outermost where replicas may part ways

    def through(
        self, jaxpr: Any, given: Sequence[Level], control: Level
    ) -> tuple[list[Level], list[Level]]:
        """Return the levels of the outputs, and those of the inputs afterwards.

        The latter differ from `given` for `jax.Ref`s that are written. `control` is the
        level of the conditions under which the code runs.
        """
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        known: dict[Any, Level] = dict(zip(jaxpr.invars, given, strict=True))

        def level_of(atom: object) -> Level:
            return Level.SAME if isinstance(atom, Literal) else known.get(atom, Level.SAME)

        again = True
        while again:  # a ref that varies in the end may have been read before
            again = False
            for equation in jaxpr.eqns:
                operands = [level_of(atom) for atom in equation.invars]
                results, after = self._equation(equation, operands, control)
                for atom, before, now in zip(equation.invars, operands, after, strict=True):
                    if now > before and not isinstance(atom, Literal):
                        known[atom] = now
                        again = True
                for variable, level in zip(equation.outvars, results, strict=True):
                    known[variable] = max(level, known.get(variable, Level.SAME))
        return [level_of(atom) for atom in jaxpr.outvars], [known[v] for v in jaxpr.invars]

    def _equation(
        self, equation: JaxprEqn, operands: list[Level], control: Level
    ) -> tuple[list[Level], list[Level]]:
        """Return the levels of the results, and those of the operands afterwards."""
        name, parameters = equation.primitive.name, equation.params
        highest = max(operands, default=Level.SAME)
        if self._visit is not None:
            self._visit(equation, highest, self._parting if control is Level.VARYING else None)
        inner = jaxprs_within(parameters)
        match name:
            case _ if gathers(equation):  # parts of a variable, which is the same on all replicas
                results, after = [Level.SAME], operands
            case "name" if parameters["name"] == STATE:
                results, after = [_in_a_ref(highest)], operands
            case "new_ref" | "get" | "freeze":
                results, after = [_in_a_ref(highest)], operands
            case "swap" | "addupdate":
                reference, *written = operands
                results = [_in_a_ref(highest)] * len(equation.outvars)
                after = [_in_a_ref(max(reference, control, *written)), *written]
            case "cond":
                self._note_parting(equation, operands[0], control)
                results, after = self._cond(parameters["branches"], operands, control)
            case "while":
                results, after = self._while(equation, operands, control)
            case "scan":
                results, after = self._scan(parameters, operands, control)
            case _ if name in _CALLS and len(inner) == 1:
                results, after = self.through(inner[0], operands, control)
            case _:
                level = self._level_after(equation, highest)
                results = [level] * len(equation.outvars)
                writes = inner and equation.effects
                after = [max(level, control)] * len(operands) if writes else operands
        return results, after

    def _note_parting(self, equation: JaxprEqn, condition: Level, control: Level) -> None:
        if condition is Level.VARYING and control is not Level.VARYING:
            self._parting = equation

    def _level_after(self, equation: JaxprEqn, highest: Level) -> Level:
        name, parameters = equation.primitive.name, equation.params
        if names_axis(equation, self._axis):
            if name in _SAME_FOR_ALL and parameters.get("axis_index_groups") is None:
                return Level.REDUCED if highest > Level.SAME else Level.SAME
            return Level.VARYING
        if any(word in name for word in _FROM_OUTSIDE):
            return Level.VARYING
        within = [
            self._level_after(each, highest)
            for jaxpr in jaxprs_within(parameters)
            for each in jaxpr.eqns
        ]
        # Nothing is known about the order in which these run, so no reduction among them counts.
        return max([highest, *(level for level in within if level is Level.VARYING)])

    def _cond(
        self, branches: Sequence[object], operands: list[Level], control: Level
    ) -> tuple[list[Level], list[Level]]:
        index, *rest = operands
        outcomes = [self.through(branch, rest, max(control, index)) for branch in branches]
        results = _joined([results for results, _ in outcomes], index)
        return results, [index, *_joined([after for _, after in outcomes])]

    def _while(
        self, equation: JaxprEqn, operands: list[Level], control: Level
    ) -> tuple[list[Level], list[Level]]:
        parameters = equation.params
        first, second = parameters["cond_nconsts"], parameters["body_nconsts"]
        constants, others = operands[:first], operands[first : first + second]
        carry, going = operands[first + second :], Level.SAME
        while True:
            rounds = max(control, going)
            (condition,), after = self.through(
                parameters["cond_jaxpr"], [*constants, *carry], rounds
            )
            results, after_body = self.through(parameters["body_jaxpr"], [*others, *carry], rounds)
            now = (
                _joined([constants, after[:first]]),
                _joined([others, after_body[:second]]),
                _joined([carry, results], condition),
                max(going, condition),
            )
            if now == (constants, others, carry, going):
                return carry, [*constants, *others, *operands[first + second :]]
            constants, others, carry, going = now
            self._note_parting(equation, going, control)

    def _scan(
        self, parameters: Any, operands: list[Level], control: Level
    ) -> tuple[list[Level], list[Level]]:
        first, second = scan_sizes(parameters)
        constants, carry = operands[:first], operands[first : first + second]
        elements = operands[first + second :]
        while True:
            results, after = self.through(
                parameters["jaxpr"], [*constants, *carry, *elements], control
            )
            now = _joined([constants, after[:first]]), _joined([carry, results[:second]])
            # Elements that are refs are written row by row.
            rows = _joined([elements, after[first + second :]])
            if (*now, rows) == (constants, carry, elements):
                rest = [*operands[first : first + second], *elements]
                return results, [*constants, *rest]
            (constants, carry), elements = now, rows


def _in_a_ref(level: Level) -> Level:
    """Return the level of a read from a ref or a cell, in which a variable's state is kept.

    A variable either is the same on all replicas or is not; how it became so does not matter.
    """
    return level if level is Level.VARYING else Level.SAME


def _joined(columns: Sequence[Sequence[Level]], also: Level = Level.SAME) -> list[Level]:
    """Return the highest level in each place."""
    return [max(also, *places) for places in zip(*columns, strict=True)]
