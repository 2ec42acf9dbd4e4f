"""The implementation of `reduce` and `gather`, for nests of any values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _nest
from replicax._describing import described
from replicax._enums import ReduceOp, VariableSynchronization
from replicax._typing import Nest
from replicax.collectives import (
    CommunicationOptions,
    agree_on_unknown_shapes,
    reduction_of,
    require_numeric,
)
from replicax.errors import InvalidArgument, InvalidType, ShapeMismatch
from replicax.values import Mirrored, PerReplica, Shape, as_plain, describe_shapes
from replicax.variables import Variable

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

Axis = int | Sequence[int] | None


def reduce_nest(strategy: StrategyLike, op: ReduceOp, nest: Nest, axis: Axis) -> Nest:
    """Return one array per leaf, which JAX can move to wherever it is used."""
    collectives, reduction = strategy.collectives, reduction_of(op)
    leaves, structure = _nest.flatten(nest)
    values = reducible(strategy, op, leaves, "reduce")
    if axis is None:
        distributed = [value for value in values if value is not None]
        reduced = iter(collectives.reduce(op, distributed, CommunicationOptions()))
        outputs = [
            leaf_array(leaf) if value is None else _plain(next(reduced))
            for leaf, value in zip(leaves, values, strict=True)
        ]
    else:
        agree_on_unknown_shapes([value for value in values if value is not None])
        outputs = [
            reduction.whole(leaf_array(leaf), _axes(axis, [leaf_array(leaf).shape]))
            if value is None
            else _plain(collectives.reduce_over(op, value, _axes(axis, value.shapes)))
            for leaf, value in zip(leaves, values, strict=True)
        ]
    return jax.tree.unflatten(structure, outputs)


def reducible(
    strategy: StrategyLike, op: ReduceOp, leaves: Sequence[object], method: str
) -> list[PerReplica | None]:
    """Return each leaf as one component per replica, or None where all have the same value."""
    reduction = reduction_of(op)
    values = [
        _of_workers(strategy, op, leaf, method)
        if _is_workers_own(strategy, leaf)
        else as_per_replica(strategy, leaf)
        for leaf in leaves
    ]
    for leaf, value in zip(leaves, values, strict=True):
        require_numeric(leaf if value is None else value, f"{method} {op.value}", reduction)
        if value is None and not reduction.repeatable:
            raise InvalidArgument(
                f"`{method}` by {op.value} got a value that is the same on all replicas of "
                f"{strategy!r}: {described(leaf)}. It would count once per replica, which is "
                "rarely intended. Use MEAN, or reduce what `strategy.run` "
                "returned; of an object that all replicas return, such as a small Python number, "
                "`run` makes no per-replica value: return `jnp.asarray(number)`."
            )
    return values


def _is_workers_own(strategy: StrategyLike, leaf: object) -> bool:
    """Tell whether each of several workers has a value of its own, which is not distributed."""
    distributed = isinstance(leaf, (PerReplica, Mirrored, Variable))
    return strategy.topology.spans_processes and not distributed


def _of_workers(strategy: StrategyLike, op: ReduceOp, leaf: object, method: str) -> PerReplica:
    """Return the workers' values as a per-replica value; in a sum, every worker counts once."""
    reduction = reduction_of(op)
    require_numeric(leaf, f"{method} {op.value}", reduction)
    array, devices = leaf_array(leaf), strategy.topology.devices
    firsts = [
        not replica or devices[replica - 1][0].process_index != devices[replica][0].process_index
        for replica in range(len(devices))
    ]
    nothing = jnp.full_like(array, reduction.identity(array.dtype))
    shares = [array if first or reduction.repeatable else nothing for first in firsts]
    value = strategy.collectives.distribute(shares)
    # Outside a program, nothing is known about the other workers' values.
    return value if value.is_assembled else PerReplica(value.values, strategy.topology)


def gather_nest(strategy: StrategyLike, nest: Nest, axis: int) -> Nest:
    """Return each leaf's components one after another, as one array."""

    def gather(leaf: object) -> jax.Array:
        value = as_per_replica(strategy, leaf, mirrored_too=True)
        if value is None:
            raise InvalidType(
                f"`gather` needs a distributed value; got {described(leaf)}, which is not one. "
                "Gather what `strategy.run` returned."
            )
        return _plain(strategy.collectives.gather(value, axis, CommunicationOptions()))

    return _nest.transform(gather, nest)


def as_per_replica(
    strategy: StrategyLike, leaf: object, *, mirrored_too: bool = False
) -> PerReplica | None:
    """Return one component per replica; None if several replicas all have the same leaf."""
    topology = strategy.topology
    if isinstance(leaf, PerReplica):
        return leaf.of_topology(topology)
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


def _plain(value: Mirrored) -> jax.Array:
    assert value.topology is not None
    return as_plain(value.primary, value.topology)


def leaf_array(leaf: object) -> jax.Array:
    return jnp.asarray(leaf.primary if isinstance(leaf, Mirrored) else leaf)


def _axes(axis: int | Sequence[int], shapes: Sequence[Shape]) -> tuple[int, ...]:
    """Return `axis` as distinct non-negative numbers, checked against every component's shape."""
    given = (axis,) if isinstance(axis, (int, np.integer)) else tuple(axis)
    ranks = {len(shape) for shape in shapes}
    rank = min(ranks)
    if len(ranks) > 1 or any(not -rank <= a < rank for a in given):
        raise ShapeMismatch(
            f"`reduce` along axis {axis!r} is out of range for the values; got "
            f"{describe_shapes(shapes)}."
        )
    return tuple(dict.fromkeys(int(a) % rank for a in given))
