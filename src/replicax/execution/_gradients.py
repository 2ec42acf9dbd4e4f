"""How the gradients of the replicas become those that an optimizer applies."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from replicax._enums import GradientReduction, ReduceOp
from replicax.collectives import CommunicationOptions
from replicax.values import Mirrored, PerReplica

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

# Here, and not in the strategies, because compiled functions depend on them: a function may run any
# strategy that it closes over.
_chosen: weakref.WeakKeyDictionary[StrategyLike, GradientReduction] = weakref.WeakKeyDictionary()


def gradient_reduction_of(strategy: StrategyLike) -> GradientReduction:
    """Return how optimizers reduce gradients that they get on the replicas of a strategy."""
    return _chosen.get(strategy, GradientReduction.SUM)


def set_gradient_reduction(strategy: StrategyLike, reduction: GradientReduction) -> None:
    if reduction is GradientReduction.SUM:
        _chosen.pop(strategy, None)
    else:
        _chosen[strategy] = reduction


def reductions_in_force() -> frozenset[tuple[Any, str]]:
    """Return what a compiled function depends on: the strategies that do not sum."""
    return frozenset((weakref.ref(each), reduction.value) for each, reduction in _chosen.items())


# In the cache keys of `jax.jit`, so that jitted parts of a replica's code are traced again too.
_traced_for = jax.make_user_context(default_value=None)


def tracing_for(
    strategy: StrategyLike, row_weight: float, *, uneven: bool
) -> AbstractContextManager[None]:
    """Return a context for tracing the code of a replica of a strategy.

    Args:
      strategy: Whose reduction the code may follow.
      row_weight: How much the replica counts in a mean.
      uneven: Whether other replicas have other shapes.
    """
    reduction = gradient_reduction_of(strategy)
    usual = reduction is GradientReduction.SUM and row_weight == 1.0 and not uneven
    return _traced_for(None if usual else (reduction.value, row_weight, uneven))


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
