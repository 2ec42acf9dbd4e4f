"""Combination of the replicas' writes to NNX variables into the variables' values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from replicax._enums import ReduceOp
from replicax.collectives import CommunicationOptions
from replicax.errors import InvalidArgument
from replicax.integrations.flax._rules import Rule, moments_of
from replicax.integrations.flax._variables import Adopted

if TYPE_CHECKING:
    from replicax._typing import Replica, StrategyLike
    from replicax.values import Mirrored, PerReplica
    from replicax.variables import Variable


@dataclass(frozen=True, slots=True)
class Change:
    """A function's change to a variable: the arrays before and after."""

    adopted: Adopted
    rule: Rule
    before: list[jax.Array]
    after: list[jax.Array]


def store(variables: Sequence[Variable], arrays: Sequence[jax.Array]) -> None:
    """Store new values, outside of replica context."""
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)


def combine_and_store(
    strategy: StrategyLike,
    replica: Replica,
    changes: Sequence[Change],
    metrics: Sequence[nnx.metrics.Welford],
) -> None:
    """Combine and store the replicas' writes; all replicas must call it."""
    _refuse(changes, replica.num_replicas_in_sync)
    if not changes:
        return
    new = _combined(replica, changes)
    for metric in metrics:
        _merge_moments(replica, [id(x) for x in moments_of(metric)], changes, new)
    variables = [v for change in changes for v in change.adopted.variables(strategy)]

    def stored(strategy: StrategyLike, *values: PerReplica) -> None:
        # They are equal now, so nothing needs to be sent between replicas.
        store(variables, [value.component(0) for value in values])

    arrays = [array for each in new for array in each]
    replica.merge("writing what replicas did to NNX variables", stored, arrays, variables)


def _refuse(changes: Sequence[Change], replicas: int) -> None:
    for change in changes:
        if change.rule is Rule.REFUSED and replicas > 1:
            raise InvalidArgument(
                f"The NNX variable {change.adopted.name!r}, a "
                f"{type(change.adopted.variable).__name__}, was changed by {replicas} replicas, "
                "and has one value. Decode outside of `run`; if it was not changed, do not use "
                "`nnx.jit` inside of `run`, which gives every variable a new value."
            )


def _combined(replica: Replica, changes: Sequence[Change]) -> list[list[jax.Array]]:
    """Return the arrays of each change, combined over all replicas."""
    new = [list(change.after) for change in changes]
    places: dict[Rule, list[tuple[int, int]]] = {Rule.SUM: [], Rule.MEAN: [], Rule.FIRST: []}
    for i, change in enumerate(changes):
        for j, array in enumerate(change.after):
            rule = change.rule
            if rule is Rule.ADDED:
                new[i][j], rule = array - change.before[j], Rule.SUM
            elif rule is Rule.MEAN and not jnp.issubdtype(array.dtype, jnp.inexact):
                rule = Rule.FIRST
            if rule in places:
                places[rule].append((i, j))
    where = [place for each in places.values() for place in each]
    if not where:
        return new
    sums, means = len(places[Rule.SUM]), len(places[Rule.MEAN])

    def combine(strategy: StrategyLike, *values: PerReplica) -> list[Mirrored]:
        collectives, options = strategy.collectives, CommunicationOptions()
        first, second, third = values[:sums], values[sums : sums + means], values[sums + means :]
        return [
            *(collectives.reduce(ReduceOp.SUM, first, options) if first else ()),
            *(collectives.reduce(ReduceOp.MEAN, second, options) if second else ()),
            *(collectives.broadcast(value) for value in third),
        ]

    results = _meet(replica, combine, [new[i][j] for i, j in where])
    for (i, j), result in zip(where, results, strict=True):
        added = changes[i].rule is Rule.ADDED
        total = changes[i].before[j] + result if added else result
        new[i][j] = total.astype(changes[i].after[j].dtype)
    return new


def _merge_moments(
    replica: Replica, variables: Sequence[int], changes: Sequence[Change], new: list[list[Any]]
) -> None:
    """Combine the replicas' counts, means and squared deviations into those of all numbers."""
    places = {id(change.adopted.variable): i for i, change in enumerate(changes)}
    if any(place not in places for place in variables):
        return
    rows = [places[place] for place in variables]
    count, mean, deviations = (new[row][0] for row in rows)

    def total(strategy: StrategyLike, *values: PerReplica) -> list[Mirrored]:
        return strategy.collectives.reduce(ReduceOp.SUM, values, CommunicationOptions())

    counted, weighted = _meet(replica, total, [count, count * mean])
    whole_mean = weighted / jnp.maximum(counted, 1)
    (whole,) = _meet(replica, total, [deviations + count * (mean - whole_mean) ** 2])
    for row, value in zip(rows, (counted, whole_mean, whole), strict=True):
        new[row][0] = value.astype(changes[row].after[0].dtype)


def _meet(
    replica: Replica, fn: Callable[..., list[Mirrored]], arrays: list[jax.Array]
) -> list[jax.Array]:
    return replica.merge("combining what replicas did to NNX variables", fn, arrays)
