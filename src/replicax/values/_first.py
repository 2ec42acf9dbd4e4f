"""`rx.first`: one replica's values, as plain arrays."""

from __future__ import annotations

from typing import Any

import jax

from replicax import _nest
from replicax._jax_compat import uncommitted, without_mesh
from replicax._typing import Nest
from replicax.values._distributed import DistributedValues
from replicax.values._placing import as_plain


@without_mesh
def first(nest: Nest) -> Nest:
    """Return a nest with the first replica's component of every distributed value.

    For values that are equal on all replicas, such as parameters that every replica has changed by
    the same gradients. Where there are several workers, the first replica of this one. Other leaves
    stay as they are.

    >>> import jax.numpy as jnp, replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> params = strategy.run(lambda w: {"w": w + 1}, args=(jnp.float32(1),))
    >>> rx.first(params)
    {'w': Array(2., dtype=float32)}
    """
    return _nest.transform(_first, nest, handed=True)


def _first(leaf: Any) -> Any:
    if not isinstance(leaf, DistributedValues):
        return leaf
    component = leaf.primary
    if not isinstance(component, jax.Array):
        return component
    return uncommitted(component) if leaf.topology is None else as_plain(component, leaf.topology)
