"""An audit: what a compiled function computes, compared with the same function run eagerly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, final

from replicax import _context, _nest, cluster
from replicax._typing import Nest
from replicax.errors import InvalidArgument
from replicax.execution._comparison import AuditReport, Comparison, Difference
from replicax.execution._state_lifting import Lifted
from replicax.input import DistributedIterator
from replicax.variables import Transaction, Variable

_every = 0  # 0: never


def audit_functions(every: int | None) -> None:
    """Audit every n-th call of each `rx.function`, its first one included; None ends that.

    A call whose compiled results differ from the eager ones raises `rx.errors.AuditFailed`. See
    `rx.audit`; this is for continuous integration, and for first runs on new hardware.
    """
    global _every
    if every is not None and (not isinstance(every, int) or every < 1):
        raise InvalidArgument(
            f"`every` must be a whole number from 1 on, or None; got {every!r}. 1 audits each call."
        )
    _every = every or 0


def is_sampled(call: int) -> bool:
    """Whether the call of a function with this number, from 0 on, is to be audited."""
    return _every > 0 and call % _every == 0


def audit_program(
    name: str,
    program: Lifted,
    as_python: Callable[[], Nest],
    compiled: Callable[[], Nest],
    rtol: float | None,
) -> AuditReport:
    """Run both from the same state, and leave the state that `compiled` makes.

    Args:
      name: The name of the function.
      program: The program that `compiled` is going to run.
      as_python: Calls the function eagerly, in the context of the caller.
      compiled: Calls it compiled.
      rtol: The relative difference that is allowed; by default, by dtype.
    """
    rehearsed, states = _rehearse(program, as_python)
    result = compiled()
    comparison = Comparison(rtol)
    comparison.outputs(result, rehearsed)
    for variable, state in states.items():
        comparison.variable(variable, state)
    differences = comparison.differences
    if program.topology is not None and program.topology.spans_processes:
        # All workers come to the same end: one that raised alone would be lost to the others.
        found = [asdict(difference) for difference in differences]
        everyones = cluster.current().meet(f"the audit of `{name}`", found)
        differences = [
            Difference(**{**each, "name": f"{each['name']} on worker {worker}"})
            for worker, theirs in enumerate(everyones)
            for each in theirs
        ]
    return AuditReport(name, comparison.compared, tuple(differences), result)


def _rehearse(program: Lifted, as_python: Callable[[], Nest]) -> tuple[Nest, dict[Variable, Any]]:
    """Run the function eagerly and undo it; return its result and the states that it made."""
    transaction = Transaction()
    # Those of the program too: what another library writes to its variables by itself passes by
    # the transaction.
    before = {variable: variable.state for variable in (*program.written, *program.read)}
    frame = replace(
        _context.current(),
        as_python=True,
        runs=None,
        transaction=transaction,
        rehearsal=Rehearsal(),
    )
    try:
        with _context.entered(frame):
            try:
                result = as_python()
            except Exception as error:
                error.add_note("Raised by the eager run of an audit, of which nothing is left.")
                raise
        touched = {**before, **dict.fromkeys(transaction.written)}
        return result, {variable: variable.state for variable in touched}
    finally:
        transaction.roll_back()
        for variable, state in before.items():
            variable.restore_state(state)


@final
class Rehearsal:
    """Gives a function the elements of iterators, and leaves them there for the next run."""

    def __init__(self) -> None:
        self._seen: Counter[DistributedIterator] = Counter()

    def pull(self, iterator: DistributedIterator) -> Nest:
        """Return the next element that this run has not seen."""
        position = self._seen[iterator]
        ahead = iterator.peek(position + 1)
        if len(ahead) <= position:
            raise StopIteration
        self._seen[iterator] += 1
        return _nest.transform(lambda leaf: leaf, ahead[position])  # its containers may be changed
