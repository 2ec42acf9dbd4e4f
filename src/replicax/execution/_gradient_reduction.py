"""The reduction of the replicas' gradients to those that an optimizer applies."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import jax
import jax.numpy as jnp

from replicax._enums import GradientReduction, ReduceOp
from replicax.collectives import CommunicationOptions
from replicax.values import Mirrored, PerReplica

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


# Reductions are here, and not in the strategies, because compiled functions depend on them: a
# function may run any strategy that it closes over. The key is a number per strategy, which
# outlives the strategy, so that no function is retraced because another strategy was collected.
@final
class _Reductions:
    """The reductions of strategies that do not sum."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[StrategyLike, int] = weakref.WeakKeyDictionary()
        self._next_number = itertools.count()
        self._chosen: dict[int, GradientReduction] = {}
        self.in_force: frozenset[tuple[int, GradientReduction]] = frozenset()

    def of(self, strategy: StrategyLike) -> GradientReduction:
        return self._chosen.get(self._numbers.get(strategy, -1), GradientReduction.SUM)

    def choose(self, strategy: StrategyLike, reduction: GradientReduction) -> None:
        if strategy not in self._numbers:
            self._numbers[strategy] = next(self._next_number)
        if reduction is GradientReduction.SUM:
            self._chosen.pop(self._numbers[strategy], None)
        else:
            self._chosen[self._numbers[strategy]] = reduction
        self.in_force = frozenset(self._chosen.items())


_reductions = _Reductions()


def gradient_reduction_of(strategy: StrategyLike) -> GradientReduction:
    """Return how optimizers reduce the gradients of a strategy's replicas."""
    return _reductions.of(strategy)


def set_gradient_reduction(strategy: StrategyLike, reduction: GradientReduction) -> None:
    _reductions.choose(strategy, reduction)


def reductions_in_force() -> frozenset[tuple[int, GradientReduction]]:
    """Return the settings that compiled functions depend on: the strategies that do not sum."""
    return _reductions.in_force


def weighted(gradient: object, reduction: GradientReduction, weight: float | jax.Array) -> object:
    """Return one replica's contribution: zeros if it has no rows.

    Args:
      gradient: The replica's gradient.
      reduction: Only a MEAN is weighted.
      weight: The replica's weight from `row_weights`; an array if all replicas share a program.
    """
    if reduction is not GradientReduction.MEAN or (isinstance(weight, float) and weight == 1.0):
        return gradient
    gradient = jnp.asarray(gradient)
    # The product has the precision of the weight: 5/3 is not a bfloat16.
    wide = jnp.promote_types(gradient.dtype, jnp.float32)
    product = (gradient.astype(wide) * weight).astype(gradient.dtype)
    return jnp.where(jnp.equal(weight, 0), jnp.zeros_like(gradient), product)


def combined(
    strategy: StrategyLike,
    reduction: GradientReduction,
    gradients: Sequence[PerReplica],
    options: CommunicationOptions,
) -> list[Mirrored]:
    """Return the combined gradients, given each replica's contribution."""
    if reduction is GradientReduction.NONE:
        return [gradient.agreed() for gradient in gradients]
    return strategy.collectives.reduce(ReduceOp[reduction.value], gradients, options)
