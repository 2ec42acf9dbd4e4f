"""The meaning of `reduce` and `gather`, for a nest of whatever users pass to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _nest
from replicax._enums import ReduceOp, VariableSynchronization
from replicax._typing import Nest
from replicax.collectives import CommunicationOptions, require_numeric
from replicax.errors import InvalidArgument, InvalidType, ShapeMismatch
from replicax.values import Mirrored, PerReplica, Shape, describe_shapes
from replicax.variables import Variable

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

Axis = int | Sequence[int] | None


def reduce_nest(strategy: StrategyLike, op: ReduceOp, nest: Nest, axis: Axis) -> Nest:
    """One array for each leaf, on the first local device."""
    collectives = strategy.collectives
    leaves, structure = _nest.flatten(nest)
    values = reducible(strategy, op, leaves, "reduce")
    if axis is None:
        distributed = [value for value in values if value is not None]
        reduced = iter(collectives.reduce(op, distributed, CommunicationOptions()))
        outputs = [
            leaf_array(leaf) if value is None else next(reduced).primary
            for leaf, value in zip(leaves, values, strict=True)
        ]
    else:
        outputs = [
            jnp.mean(leaf_array(leaf), axis=_axes(axis, [leaf_array(leaf).shape]))
            if value is None
            else collectives.reduce_over(op, value, _axes(axis, value.shapes)).primary
            for leaf, value in zip(leaves, values, strict=True)
        ]
    return jax.tree.unflatten(structure, outputs)


def reducible(
    strategy: StrategyLike, op: ReduceOp, leaves: Sequence[Any], method: str
) -> list[PerReplica | None]:
    """Each leaf as one component a replica; None for what is the same on all, if that is fine."""
    values = [as_per_replica(strategy, leaf) for leaf in leaves]
    for leaf, value in zip(leaves, values, strict=True):
        require_numeric(leaf if value is None else value, method)
        if value is None and op is not ReduceOp.MEAN:
            raise InvalidArgument(
                f"`{method}` by {op.value} got a value that is the same on all replicas of "
                f"{strategy!r}: {leaf!r}. Summing it would multiply it by the number of replicas, "
                "which is hardly ever meant. Use MEAN, or reduce what `strategy.run` returned; of "
                "an object that all replicas return, such as a small Python number, `run` makes "
                "no per-replica value: return `jnp.asarray(number)`."
            )
    return values


def gather_nest(strategy: StrategyLike, nest: Nest, axis: int) -> Nest:
    """Each leaf's components one after another, on the first local device."""

    def gather(leaf: Any) -> jax.Array:
        value = as_per_replica(strategy, leaf, mirrored_too=True)
        if value is None:
            raise InvalidType(
                f"`gather` needs a distributed value; got {leaf!r}, which is not one. Gather what "
                "`strategy.run` returned."
            )
        return strategy.collectives.gather(value, axis, CommunicationOptions()).primary

    return _nest.transform(gather, nest)


def as_per_replica(
    strategy: StrategyLike, leaf: Any, *, mirrored_too: bool = False
) -> PerReplica | None:
    """The leaf as one component a replica; None if it is the same on all of several replicas."""
    topology = strategy.topology
    if isinstance(leaf, PerReplica):
        return leaf.at_home(topology)
    if isinstance(leaf, Variable):
        on_read = leaf.synchronization is VariableSynchronization.ON_READ
        a_copy_each = len(leaf.values) == len(topology.local_replicas)
        if on_read or (mirrored_too and a_copy_each and topology.num_replicas > 1):
            return PerReplica([copy.value for copy in leaf.values], topology)
        leaf = leaf.value
    if isinstance(leaf, Mirrored) and mirrored_too:
        return PerReplica(leaf.values, topology)
    if topology.num_replicas == 1:
        return PerReplica([leaf_array(leaf)], topology)
    return None


def leaf_array(leaf: Any) -> jax.Array:
    return jnp.asarray(leaf.primary if isinstance(leaf, Mirrored) else leaf)


def _axes(axis: int | Sequence[int], shapes: Sequence[Shape]) -> tuple[int, ...]:
    """`axis` as distinct non-negative numbers, checked against the shape of every component."""
    given = (axis,) if isinstance(axis, (int, np.integer)) else tuple(axis)
    ranks = {len(shape) for shape in shapes}
    rank = min(ranks)
    if len(ranks) > 1 or any(not -rank <= a < rank for a in given):
        raise ShapeMismatch(
            f"`reduce` along axis {axis!r} is out of range for the values; got "
            f"{describe_shapes(shapes)}."
        )
    return tuple(dict.fromkeys(int(a) % rank for a in given))
