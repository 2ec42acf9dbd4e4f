"""Traces a function that reads and writes variables into one pure jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
from jax.extend.core import ClosedJaxpr

from replicax import _context
from replicax._context import Frame
from replicax.errors import InconsistentTracing
from replicax.execution._plan import Plan
from replicax.execution._program import OuterLevel
from replicax.execution._pulling import Pulls
from replicax.execution._summed_twice import Watched
from replicax.topology import Topology
from replicax.variables import Variable

Trace = Callable[[OuterLevel, Sequence[Any]], list[jax.Array]]

# JAX keeps what it has traced of a function, such as one that the user jits or the body of a
# `lax.scan`, for the next time. What it does with variables holds for one pass over one program, so
# every pass has a cache of its own.
_pass = jax.make_user_context(None)


@final
@dataclass(frozen=True, slots=True)
class TracedProgram:
    """A function as a jaxpr: of states, arrays and elements; to new states and results.

    Args:
      jaxpr: The program.
      written: The variables that it writes. Their states come first, in and out.
      read: Those that it only reads, whose states come next.
      topology: Of the strategy that it runs; None if it needs none.
      plan: What the first pass has found.
    """

    jaxpr: ClosedJaxpr
    written: list[Variable]
    read: list[Variable]
    topology: Topology | None
    plan: Plan


def trace_program(
    function: Callable[[list[Any]], list[jax.Array]],
    frame: Frame,
    arrays: Sequence[Any],
    pulls: Pulls,
) -> TracedProgram:
    """Trace a function of arrays, and of the variables and iterators that it uses by itself.

    Args:
      function: Returns arrays.
      frame: The context in which the function was called.
      arrays: Its arguments; only their shapes and dtypes matter.
      pulls: Is told which elements of iterators the function takes.
    """

    def trace(level: OuterLevel, arrays: Sequence[Any]) -> list[jax.Array]:
        frame_here = replace(frame, program=level, transaction=None)
        with _context.entered(frame_here), _pass(object()):
            return function(list(arrays))

    plan = Plan(pulls=pulls)
    try:
        return _in_two_passes(trace, arrays, plan)
    except InconsistentTracing:
        if not plan.skipped:
            raise
        # The rule of a `custom_vjp` may use variables that nothing else does. But if the first pass
        # does not find the same again, Python state has changed, and that is not to be hidden.
        found = plan.found()
        pulls.restart()
        again = Plan(pulls=pulls)
        _first_pass(trace, arrays, again)
        if again.found() != found:
            raise
    pulls.restart()
    return _in_two_passes(trace, arrays, Plan(pulls=pulls, thorough=True))


def _first_pass(trace: Trace, arrays: Sequence[Any], plan: Plan) -> ClosedJaxpr:
    def find(arrays: Sequence[Any]) -> list[jax.Array]:
        level = OuterLevel(plan, None)
        results = trace(level, arrays)
        plan.outer = level.touched
        return results

    return jax.make_jaxpr(find)(arrays)


def _in_two_passes(trace: Trace, arrays: Sequence[Any], plan: Plan) -> TracedProgram:
    jaxpr = _first_pass(trace, arrays, plan)
    written = list(plan.outer.written)
    read = [variable for variable in plan.outer.read if variable not in plan.outer.written]
    variables = [*written, *read]
    topology = plan.topology or _home_of(variables) or plan.noted
    if plan.complete:
        return TracedProgram(jaxpr, written, read, topology, plan)
    plan.topology, plan.watched = topology, Watched()

    def pure(
        states: Sequence[Any], arrays: Sequence[Any], elements: Sequence[Sequence[Any]]
    ) -> list[jax.Array]:
        refs = {v: jax.new_ref(state) for v, state in zip(variables, states, strict=True)}
        results = trace(OuterLevel(plan, refs, elements), arrays)
        return [*(refs[variable][...] for variable in written), *results]

    states = [variable.lift(topology) for variable in variables]
    elements = [element.arrays or [] for element in plan.pulls.elements]
    jaxpr = jax.make_jaxpr(pure)(states, arrays, elements)
    return TracedProgram(jaxpr, written, read, topology, plan)


def _home_of(variables: Sequence[Variable]) -> Topology | None:
    """The topology of a program without a `run`, if its variables have one."""
    for variable in variables:
        if variable.strategy is not None:
            return variable.strategy.topology
    return None
