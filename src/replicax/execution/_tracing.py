"""Tracing a function that reads and writes variables into one pure jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
from jax.extend.core import ClosedJaxpr

from replicax import _context
from replicax._context import Frame
from replicax.errors import InconsistentTracing
from replicax.execution._captures import Captures
from replicax.execution._iterator_elements import TakenElements
from replicax.execution._program_levels import OuterLevel
from replicax.execution._summed_twice import WatchedGradients
from replicax.topology import Topology
from replicax.variables import Variable, storage_of

Trace = Callable[[OuterLevel, Sequence[Any]], list[jax.Array]]

# JAX caches its traces of functions, such as one that the user jits or the body of a `lax.scan`.
# What a trace does with variables is valid for one pass over one program, so every pass has a cache
# of its own.
_pass = jax.make_user_context(None)


@final
@dataclass(frozen=True, slots=True)
class TracedProgram:
    """A function as a jaxpr, from states, arrays and elements to new states and results.

    Args:
      jaxpr: The program.
      written: The variables that it writes. Their states come first, in and out.
      read: Those that it only reads, whose states come next.
      topology: The topology of the strategy that it runs; None if it needs none.
      captures: What the first pass has found.
    """

    jaxpr: ClosedJaxpr
    written: list[Variable]
    read: list[Variable]
    topology: Topology | None
    captures: Captures


def trace_program(
    function: Callable[[list[Any]], list[jax.Array]],
    frame: Frame,
    arrays: Sequence[object],
    taken: TakenElements,
) -> TracedProgram:
    """Trace a function of arrays that may also use variables and iterators.

    Args:
      function: A function that returns arrays.
      frame: The context in which the function was called.
      arrays: Its arguments; only their shapes and dtypes matter.
      taken: Records the elements of iterators that the function takes.
    """

    def trace(level: OuterLevel, arrays: Sequence[object]) -> list[jax.Array]:
        frame_here = replace(frame, program=level, transaction=None)
        with _context.entered(frame_here), _pass(object()):
            return function(list(arrays))

    captures = Captures(taken=taken)
    try:
        return _in_two_passes(trace, arrays, captures)
    except InconsistentTracing:
        if not captures.skipped:
            raise
        # The rule of a `custom_vjp` may use variables that nothing else does. But if another first
        # pass finds something else, Python state has changed, which must not be hidden.
        found = captures.found()
        taken.restart()
        again = Captures(taken=taken)
        _first_pass(trace, arrays, again)
        if again.found() != found:
            raise
    taken.restart()
    return _in_two_passes(trace, arrays, Captures(taken=taken, thorough=True))


def _first_pass(trace: Trace, arrays: Sequence[object], captures: Captures) -> ClosedJaxpr:
    def find(arrays: Sequence[object]) -> list[jax.Array]:
        level = OuterLevel(captures, None)
        results = trace(level, arrays)
        captures.outer = level.touched
        return results

    return jax.make_jaxpr(find)(arrays)


def _in_two_passes(trace: Trace, arrays: Sequence[object], captures: Captures) -> TracedProgram:
    jaxpr = _first_pass(trace, arrays, captures)
    written = list(captures.outer.written)
    read = [variable for variable in captures.outer.read if variable not in captures.outer.written]
    variables = [*written, *read]
    topology = captures.topology or _topology_of(variables) or captures.noted
    if captures.complete:
        return TracedProgram(jaxpr, written, read, topology, captures)
    captures.topology, captures.watched = topology, WatchedGradients()

    def pure(
        states: Sequence[object], arrays: Sequence[object], elements: Sequence[Sequence[object]]
    ) -> list[jax.Array]:
        cells = captures.outer.cells(variables, states)
        results = trace(OuterLevel(captures, cells, elements), arrays)
        return [*(cells[variable].last() for variable in written), *results]

    states = [storage_of(variable).example(topology) for variable in variables]
    elements = [element.arrays or [] for element in captures.taken.elements]
    jaxpr = jax.make_jaxpr(pure)(states, arrays, elements)
    return TracedProgram(jaxpr, written, read, topology, captures)


def _topology_of(variables: Sequence[Variable]) -> Topology | None:
    """Return the topology of a program without a `run`, if its variables have one."""
    for variable in variables:
        if variable.strategy is not None:
            return variable.strategy.topology
    return None
