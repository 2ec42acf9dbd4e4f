"""Components of different shapes as one global array, padded with zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from replicax.topology import Topology
from replicax.values._device_put import assembled
from replicax.values._distributed import Shape


def largest_of(shapes: Sequence[Shape]) -> Shape:
    """Return the largest size in each dimension of shapes of equal rank."""
    return tuple(map(max, zip(*shapes, strict=True)))


def pad(components: Sequence[object], shapes: Sequence[Shape], topology: Topology) -> jax.Array:
    """Return the local components as a global array, each padded to the largest of `shapes`."""
    largest = largest_of(shapes)
    if any(isinstance(component, Tracer) for component in components):
        return jnp.concatenate([_filled(jnp.pad, jnp.asarray(c), largest) for c in components])
    # This is done on the host: `jnp.pad` would compile a program for every shape.
    rows = [_filled(np.pad, np.asarray(component), largest) for component in components]
    count, *rest = largest
    return assembled((count * topology.num_replicas, *rest), topology.split, rows, topology)


def cut_traced(padded: jax.Array, shapes: Sequence[Shape]) -> tuple[jax.Array, ...]:
    """Return the components of all replicas from a padded array in a program."""
    rows = len(padded) // len(shapes)
    return tuple(
        padded[i * rows : (i + 1) * rows][tuple(map(slice, shape))]
        for i, shape in enumerate(shapes)
    )


def cut_placed(
    parts: Sequence[jax.Array], shapes: Sequence[Shape], topology: Topology
) -> tuple[jax.Array, ...]:
    """Return the local components, given each local replica's part of a padded array."""
    return tuple(
        jax.device_put(np.asarray(part)[tuple(map(slice, shapes[replica]))], sharding)
        for part, replica, sharding in zip(
            parts, topology.local_replicas, topology.local_shardings, strict=True
        )
    )


def _filled(pad: Callable[..., Any], array: Any, shape: Shape) -> Any:
    return pad(array, [(0, size - own) for size, own in zip(shape, array.shape, strict=True)])
