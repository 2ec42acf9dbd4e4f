"""The rules for each kind of NNX variable: the replicas' reads, and the effect of their writes."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import final

import jax
import jax.numpy as jnp
from flax import nnx

from replicax._enums import VariableAggregation


class Rule(enum.Enum):
    """A rule that combines the replicas' writes into one value."""

    AGREED = "all replicas write the same, because they compute it from the same"
    SUM = "the sum; the first replica begins with the value, the others with zeros"
    ADDED = "the value, and what each replica has added to it"
    MEAN = "the mean; of whole numbers, what the first replica has"
    FIRST = "what the first replica has"
    MOMENTS = "those of all numbers that were counted (count, mean, squared deviations)"
    KEY = "nothing: replicas have keys of their own, derived from that of the variable"
    ASIDE = "nothing: it is made anew in every call"
    REFUSED = "nothing: replicas would disagree"


_STATED = {
    VariableAggregation.SUM: Rule.ADDED,
    VariableAggregation.MEAN: Rule.MEAN,
    VariableAggregation.ONLY_FIRST_REPLICA: Rule.FIRST,
}


@final
class Rules:
    """The rules for the variables of some modules, optimizers and metrics."""

    def __init__(self, nodes: Iterable[nnx.Pytree]) -> None:
        nodes = list(nodes)
        self.moments = [node for node in nodes if isinstance(node, nnx.metrics.Welford)]
        self._of_moments = {id(x) for node in self.moments for x in moments_of(node)}
        optimizers = [node for node in nodes if isinstance(node, nnx.Optimizer)]
        self._trained = [nnx.filterlib.to_predicate(each.wrt) for each in optimizers]

    def of(self, variable: nnx.Variable) -> Rule:
        stated = VariableAggregation.parse(variable.get_metadata("aggregation", "NONE"))
        if stated is not VariableAggregation.NONE:
            return _STATED[stated]
        if isinstance(variable, nnx.RngKey):
            return Rule.KEY
        if isinstance(variable, (nnx.Param, nnx.OptState, nnx.RngCount)):
            return Rule.AGREED
        if isinstance(variable, nnx.metrics.MetricState):
            return Rule.MOMENTS if id(variable) in self._of_moments else Rule.SUM
        if isinstance(variable, nnx.Intermediate):
            return Rule.ASIDE
        if isinstance(variable, nnx.Cache):
            return Rule.REFUSED
        if isinstance(variable, nnx.BatchStat):
            return Rule.MEAN
        trained = any(is_trained((), variable) for is_trained in self._trained)
        return Rule.AGREED if trained else Rule.MEAN


def moments_of(metric: nnx.metrics.Welford) -> tuple[nnx.Variable, nnx.Variable, nnx.Variable]:
    return metric.count, metric.mean, metric.m2


def as_read(rule: Rule, value: object, replica: int | jax.Array) -> object:
    """Return the value that a replica reads from a variable with this value."""
    if rule is Rule.KEY:
        # The first replica draws what one device would; the others draw something else.
        other = _own_key
    elif rule in (Rule.SUM, Rule.MOMENTS):
        other = _zeros
    else:
        return value
    if isinstance(replica, int):
        return value if replica == 0 else jax.tree.map(lambda x: other(x, replica), value)
    return jax.tree.map(lambda x: jnp.where(replica == 0, x, other(x, replica)), value)


def _own_key(key: jax.Array, replica: int | jax.Array) -> jax.Array:
    if key.ndim == 0:
        return jax.random.fold_in(key, replica)
    flat = key.reshape(-1)
    return jax.vmap(lambda each: jax.random.fold_in(each, replica))(flat).reshape(key.shape)


def _zeros(array: jax.Array, replica: int | jax.Array) -> jax.Array:
    return jnp.zeros_like(array)
