"""An audit: a compiled function's results, compared with those of the eager function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, final

import jax

from replicax import _context, _nest, cluster
from replicax._settings import settings
from replicax._typing import Nest
from replicax.errors import InvalidArgument
from replicax.execution._comparison import (
    AuditDifference,
    AuditReport,
    Comparison,
    Tolerance,
)
from replicax.execution._compiled_program import CompiledProgram
from replicax.input import DistributedIterator
from replicax.variables import Transaction, Variable, restore_state, state_of, storage_of


@final
@dataclass(frozen=True, eq=False)
class _Sampling:
    """The settings of the last call of `audit_functions`."""

    every: int
    tolerance: Tolerance


def audit_functions(
    every: int | None, *, rtol: float | None = None, atol: float | None = None
) -> None:
    """Audit the next call of each `rx.function` and every n-th after it; None turns this off.

    A call whose compiled results differ from the eager ones raises `rx.errors.AuditFailed`. See
    `rx.audit`; this is for continuous integration, and for first runs on new hardware.

    Args:
      every: Audit one call in this many; 1 audits every call.
      rtol: The relative difference that is allowed; by default, what rounding explains.
      atol: The absolute difference that is always allowed.
    """
    if every is None:
        settings.audits = None
        return
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise InvalidArgument(
            f"`every` must be a whole number from 1 on, or None; got {every!r}. 1 audits each call."
        )
    settings.audits = _Sampling(every, Tolerance(rtol, atol))


@final
class Samples:
    """The calls of one function, some of which are audited."""

    def __init__(self) -> None:
        self._sampling: _Sampling | None = None
        self._calls = 0

    def next(self) -> Tolerance | None:
        """Count a call; return how to audit it, or None if it is not to be audited."""
        sampling: _Sampling | None = settings.audits
        if sampling is None:
            return None
        if sampling is not self._sampling:
            self._sampling, self._calls = sampling, 0
        self._calls += 1
        return sampling.tolerance if (self._calls - 1) % sampling.every == 0 else None


def audit_program(
    name: str,
    program: CompiledProgram,
    as_python: Callable[[], Nest],
    compiled: Callable[[], Nest],
    tolerance: Tolerance,
) -> AuditReport:
    """Run `as_python` and `compiled` from the same state; leave the state that `compiled` makes.

    Args:
      name: The name of the function.
      program: The program that `compiled` is going to run.
      as_python: Calls the function eagerly, in the context of the caller.
      compiled: Calls it compiled.
      tolerance: How much the results may differ.
    """
    try:
        # `jax.jit` is off: a program for the gradient alone may be as wrong as the whole one, and
        # JAX loops whose bodies write to variables would otherwise not run as Python.
        with jax.disable_jit():
            rehearsed, states = _rehearse(program, as_python)
    except ValueError as error:
        if "disable_jit" not in str(error):  # JAX has no loops of zero iterations there
            raise
        rehearsed, states = _rehearse(program, as_python)
    result = compiled()
    comparison = Comparison(tolerance)
    comparison.outputs(result, rehearsed)
    for variable, state in states.items():
        seen = storage_of(variable).seen
        comparison.states(f"variable {variable.name!r}", seen(state_of(variable)), seen(state))
    differences = comparison.differences
    if program.topology is not None and program.topology.spans_processes:
        # All workers reach the same verdict: one that raised alone would be lost to the others.
        found = [asdict(difference) for difference in differences]
        everyones = cluster.current().all_gather(f"the audit of `{name}`", found)
        differences = [
            AuditDifference(**{**each, "name": f"{each['name']} on worker {worker}"})
            for worker, theirs in enumerate(everyones)
            for each in theirs
        ]
    return AuditReport(name, comparison.compared, tuple(differences), result)


def _rehearse(
    program: CompiledProgram, as_python: Callable[[], Nest]
) -> tuple[Nest, dict[Variable, Any]]:
    """Run the function eagerly and undo it; return its result and the states that it made."""
    transaction = Transaction()
    touched = (*program.written, *program.read)
    # Writes that another library makes to its own variables bypass the transaction.
    kept_elsewhere = {v: state_of(v) for v in touched if not storage_of(v).reusable}
    frame = replace(_context.current(), runs=None, transaction=transaction, rehearsal=Rehearsal())
    try:
        with _context.entered(frame):
            result = as_python()
        written = dict.fromkeys((*program.written, *kept_elsewhere, *transaction.written))
        return result, {variable: state_of(variable) for variable in written}
    except Exception as error:
        error.add_note("Raised by the eager run of an audit; its changes have been undone.")
        raise
    finally:
        transaction.roll_back()
        for variable, state in kept_elsewhere.items():
            restore_state(variable, state)


@final
class Rehearsal:
    """A run whose effects are undone: it sees elements of iterators without taking them."""

    def __init__(self) -> None:
        self._seen: Counter[DistributedIterator] = Counter()

    def next_element(self, iterator: DistributedIterator) -> Nest:
        """Return the next element that this run has not seen."""
        position = self._seen[iterator]
        ahead = iterator._peek(position + 1)
        if len(ahead) <= position:
            raise StopIteration
        self._seen[iterator] += 1
        return _nest.transform(lambda leaf: leaf, ahead[position])  # in containers of its own
