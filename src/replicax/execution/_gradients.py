"""How the gradients of the replicas become those that an optimizer applies."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from replicax._enums import GradientReduction, ReduceOp
from replicax.collectives import CommunicationOptions
from replicax.values import Mirrored, PerReplica

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

# Here, and not in the strategies, because compiled functions depend on them: a function may run any
# strategy that it closes over. By a number per strategy, which stays when the strategy is gone: no
# function must be traced again because another strategy was collected.
_numbers: weakref.WeakKeyDictionary[StrategyLike, int] = weakref.WeakKeyDictionary()
_chosen: dict[int, GradientReduction] = {}
_next_number = itertools.count()


def gradient_reduction_of(strategy: StrategyLike) -> GradientReduction:
    """Return how optimizers reduce gradients that they get on the replicas of a strategy."""
    return _chosen.get(_numbers.get(strategy, -1), GradientReduction.SUM)


def set_gradient_reduction(strategy: StrategyLike, reduction: GradientReduction) -> None:
    if strategy not in _numbers:
        _numbers[strategy] = next(_next_number)
    if reduction is GradientReduction.SUM:
        _chosen.pop(_numbers[strategy], None)
    else:
        _chosen[_numbers[strategy]] = reduction


def reductions_in_force() -> frozenset[tuple[int, GradientReduction]]:
    """Return what a compiled function depends on: the strategies that do not sum."""
    return frozenset(_chosen.items())


def weighted(gradient: Any, reduction: GradientReduction, weight: float | jax.Array) -> Any:
    """Return what one replica contributes; of a replica without rows, zeros whatever it computed.

    Args:
      gradient: That of the replica.
      reduction: Only a MEAN is weighted.
      weight: As `row_weights` gives it; an array where the program is the same for all replicas.
    """
    if reduction is not GradientReduction.MEAN or (isinstance(weight, float) and weight == 1.0):
        return gradient
    gradient = jnp.asarray(gradient)
    # The product in the precision of the weight: 5/3 is no bfloat16.
    wide = jnp.promote_types(gradient.dtype, jnp.float32)
    product = (gradient.astype(wide) * weight).astype(gradient.dtype)
    return jnp.where(jnp.equal(weight, 0), jnp.zeros_like(gradient), product)


def combined(
    strategy: StrategyLike,
    reduction: GradientReduction,
    gradients: Sequence[PerReplica],
    options: CommunicationOptions,
) -> list[Mirrored]:
    """Return the gradients that hold for all replicas, of what each contributes."""
    if reduction is GradientReduction.NONE:
        return [gradient.agreed() for gradient in gradients]
    return strategy.collectives.reduce(ReduceOp[reduction.value], gradients, options)
