"""The update of a step, as a function of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from replicax._typing import Nest
from replicax.integrations.optax._nests import Nests
from replicax.integrations.optax._slots import StateStructure
from replicax.topology import Topology
from replicax.values import Mirrored


def updated(
    tx: Any,
    nests: Nests,
    state: StateStructure,
    constraints: Sequence[Callable[[jax.Array], Any] | None],
    gradients: Nest,
    own: Any,
    values: Any,
    extra: dict[str, Nest],
) -> tuple[Any, Any]:
    """Return the values of the variables, and of the optimizer's own variables, after an update."""
    import optax  # here, because it would add 0.4 s to importing replicax

    iterations, *slots = own
    params = jax.tree.unflatten(nests.params, values)
    updates, new_state = call_update(
        tx, jax.tree.unflatten(nests.gradients, gradients), state.state(slots), params, extra
    )
    moved = nests.params.flatten_up_to(optax.apply_updates(params, updates))
    new_values = [
        value if constraint is None else jnp.asarray(constraint(value), value.dtype)
        for value, constraint in zip(moved, constraints, strict=True)
    ]
    return new_values, [iterations + 1, *state.arrays(new_state)]


def call_update(tx: Any, gradients: Nest, state: Any, params: Nest, extra: dict[str, Nest]) -> Any:
    import optax

    # Like a chain, a transformation that takes no extra arguments ignores them.
    if extra and isinstance(tx, optax.GradientTransformation):
        tx = optax.with_extra_args_support(tx)
    return tx.update(gradients, state, params, **extra)


def like(gradient: object, value: jax.Array, topology: Topology) -> jax.Array:
    """Return the gradient on the devices of its variable, whose strategy has `topology`."""
    if isinstance(gradient, Mirrored) and gradient.topology is not None:
        copies = gradient.array(gradient.topology)
        if not isinstance(value, Tracer) and copies.devices() != value.devices():
            # The variable is on one device, which the replicas share.
            return jax.device_put(gradient.primary, value.sharding)
        gradient = copies
    if isinstance(value, Tracer):
        return jnp.asarray(gradient)
    if isinstance(gradient, jax.Array) and gradient.sharding == value.sharding:
        return gradient
    if topology.spans_processes:
        return topology.replicate(gradient)
    return jax.device_put(gradient, value.sharding) if value.committed else jnp.asarray(gradient)


def shape_of(number: Any) -> jax.ShapeDtypeStruct:
    dtype = number.dtype if hasattr(number, "dtype") else jnp.result_type(number)
    return jax.ShapeDtypeStruct(jnp.shape(number), dtype)
