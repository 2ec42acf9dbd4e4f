"""`rx.first`: one replica's values, as plain arrays."""

from __future__ import annotations

from typing import overload

import jax

from replicax import _nest
from replicax._jax_compat import uncommitted, without_mesh
from replicax._typing import Nest, Values
from replicax.values._device_put import as_plain
from replicax.values._distributed import DistributedValues


@overload
def first(nest: DistributedValues) -> jax.Array: ...
@overload
def first(nest: Values) -> Values: ...
@without_mesh
def first(nest: Nest) -> Nest:
    """Return a nest with the first replica's component of every distributed value.

    This is for values that are equal on all replicas, such as parameters that every replica has
    updated with the same gradients. With several workers, it takes this worker's first replica.
    Other leaves are unchanged.

    >>> import jax.numpy as jnp, replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> params = strategy.run(lambda w: {"w": w + 1}, args=(jnp.float32(1),))
    >>> rx.first(params)
    {'w': Array(2., dtype=float32)}
    """
    return _nest.transform(_first, nest, keep_opaque=True)


def _first(leaf: object) -> object:
    if not isinstance(leaf, DistributedValues):
        return leaf
    component = leaf.primary
    if not isinstance(component, jax.Array):
        return component
    return uncommitted(component) if leaf.topology is None else as_plain(component, leaf.topology)
