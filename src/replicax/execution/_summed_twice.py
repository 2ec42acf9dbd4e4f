"""Warnings about gradients that were reduced over the replicas, and are about to be summed again.

Eager replicas have numbers, which are compared. In a program, gradients are marked where they are
summed, and its jaxpr shows whether the marked values had differed between the replicas.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from replicax._once import first_time
from replicax.errors import SummedTwice
from replicax.execution._varying import Level, runs_in, visit_run
from replicax.values import PerReplica

_PREFIX = "replicax.gradients."
_LIBRARIES = ("replicax", "jax", "optax", "keras", "flax", "functools", "contextlib", "threading")


class Site(NamedTuple):
    """A line of the user's program."""

    filename: str
    line: int


Report = Callable[[Site], None]


def users_line() -> Site:
    """Return the innermost line that is in none of the libraries."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            break
        frame = frame.f_back
    return Site(frame.f_code.co_filename, frame.f_lineno)


def warn_once(optimizer: Any, what: str, advice: str, site: Site) -> None:
    """Warn of a sum of sums: once per optimizer, or once per line if `optimizer` is None.

    Args:
      optimizer: The optimizer that gets the gradients; None if it is a new object in every step.
      what: The call that sums them.
      advice: What to do instead.
      site: Where it is called.
    """
    topic = SummedTwice if optimizer is not None else (SummedTwice, site)
    if not first_time(topic, about=optimizer):
        return
    warnings.warn_explicit(
        f"{what} at {site.filename}:{site.line} got gradients that have been reduced over the "
        "replicas already (by `all_reduce`, `lax.psum` or `lax.pmean`), and sums them once more. "
        f"{advice}",
        SummedTwice,
        *site,
    )


def are_equal(gradients: Sequence[PerReplica]) -> bool:
    """Tell whether the replicas of this process have the same gradients, and not only zeros."""
    some = False
    for gradient in sorted(gradients, key=lambda each: np.size(each.values[0])):
        first, *others = (np.asarray(component) for component in gradient.values)
        if not others or not all(np.array_equal(first, other) for other in others):
            return False
        some = some or bool(np.any(first))
    return some


@final
class WatchedGradients:
    """The gradients that a program sums, each group with the function that reports it."""

    def __init__(self) -> None:
        self._groups: list[tuple[Site, Report]] = []

    def mark(self, gradients: Sequence[object], report: Report) -> list[object]:
        """Return the gradients, marked to be found in the jaxpr; XLA does not see the marks."""
        name = f"{_PREFIX}{len(self._groups)}"
        self._groups.append((users_line(), report))
        return [checkpoint_name(gradient, name) for gradient in gradients]

    def examine(self, program: Jaxpr | ClosedJaxpr) -> None:
        """Report the groups in which something was reduced and nothing differs any more."""
        if not self._groups:
            return
        found: dict[tuple[str, int], Level] = {}

        def visit(equation: JaxprEqn, level: Level, parting: JaxprEqn | None) -> None:
            name = str(equation.params.get("name", ""))
            if equation.primitive.name == "name" and name.startswith(_PREFIX):
                key = name, id(equation)
                found[key] = max(level, found.get(key, Level.SAME))

        for run in runs_in(program):
            visit_run(run, visit)
        for number, (site, report) in enumerate(self._groups):
            own = [level for (name, _), level in found.items() if name == f"{_PREFIX}{number}"]
            if max(own, default=Level.SAME) is Level.REDUCED:
                report(site)
