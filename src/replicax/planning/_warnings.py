"""The points to consider before a plan is carried out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from replicax._units import of_bytes, of_seconds, of_share

if TYPE_CHECKING:
    from replicax.planning._plan import Plan

_MUCH = 0.5  # the share of one variable in the memory needed, or of all whole ones in the capacity

_DIVIDE = (
    "divide variables over the replicas (`rx.FullyShardedStrategy`, planned by "
    "`placement=rx.parts.ShardedPlacement()`) or over more devices per replica "
    "(`computation_shape`, `strategy.extended.partition`)"
)


def warnings_of(plan: Plan) -> Iterator[str]:
    """Yield sentences with the problem, the numbers and the remedy."""
    yield from _memory(plan)
    yield from _replicated(plan)
    yield from _communication(plan)


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    if memory.capacity is None or memory.fits:
        return
    fixed = memory.variables + memory.inputs
    if fixed > memory.capacity:
        advice = f"Variables and inputs alone do not fit: {_DIVIDE}, or use chips with more memory."
    else:
        advice = (
            "Use a smaller batch, compute again instead of keeping (`jax.checkpoint`), "
            f"{_DIVIDE}, or use chips with more memory."
        )
    yield (
        f"The step does not fit: it needs {of_bytes(memory.needed)} on a device that has "
        f"{of_bytes(memory.capacity)}. Variables are {of_bytes(memory.variables)} of it, inputs "
        f"{of_bytes(memory.inputs)}. {advice}"
    )


def _replicated(plan: Plan) -> Iterator[str]:
    whole = [variable for variable in plan.variables if variable.whole]
    needed, capacity = plan.memory.needed, plan.memory.capacity
    if not whole or capacity is None or sum(v.bytes for v in whole) < _MUCH * capacity:
        return
    largest = whole[0]
    if largest.bytes > _MUCH * needed:
        which = f"Variable {largest.name!r} ({of_bytes(largest.bytes)}) is"
    else:
        which = (
            f"{len(whole)} variables, of which {largest.name!r} is the largest "
            f"({of_bytes(largest.bytes)}), are"
        )
    share = sum(variable.bytes for variable in whole) / needed
    yield (
        f"{which} whole on every device; variables like that are {of_share(share)} of the memory "
        "that is needed. Divide them over the replicas (`rx.FullyShardedStrategy`, planned by "
        "`placement=rx.parts.ShardedPlacement()`), or over several devices per replica: "
        "`computation_shape`, and `strategy.extended.partition` where they are created."
    )


def _communication(plan: Plan) -> Iterator[str]:
    times = plan.estimate
    if times is None or times.communication <= max(times.compute, times.memory):
        return
    largest = max(plan.collectives, key=lambda collective: collective.sent_bytes)
    where = ", ".join(str(origin) for origin in largest.origins)
    yield (
        f"The step is bound by communication: {of_seconds(times.communication)} of it, where "
        f"computing takes {of_seconds(times.compute)} and memory {of_seconds(times.memory)}. Most "
        f"is the {largest.kind} of {of_bytes(largest.bytes)} that comes from {where}. Use a larger "
        "batch per replica, sum up gradients over several batches before they are applied, or "
        "communicate in a smaller dtype."
    )
