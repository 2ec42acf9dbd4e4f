"""The gradients of all replicas, for `nnx.Optimizer`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import jax
import optax

from replicax import _context
from replicax._context import Kind
from replicax._enums import ReduceOp
from replicax.errors import InvalidArgument
from replicax.strategies import get_replica_context

_OF_THE_LOSS = ("value", "grad")  # extra arguments that are sums over the batch, as gradients are


@final
@dataclass(frozen=True)
class Summing:
    """A transformation that gets the sum of the replicas' gradients.

    What an `nnx.Optimizer` has in the place of its own while replicas run.
    """

    tx: optax.GradientTransformation

    def init(self, params: Any) -> Any:
        return self.tx.init(params)

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        if _context.current().kind is Kind.REPLICA:
            if "value_fn" in extra:
                raise InvalidArgument(
                    "`update` of an nnx.Optimizer got `value_fn` in a function given to `run`: a "
                    "line search, for which every replica would see its own part of the batch. "
                    "Use an optimizer without one, or search outside of `run`."
                )
            shared = {name: extra[name] for name in _OF_THE_LOSS if name in extra}
            updates, shared = _summed((updates, shared))
            extra = {**extra, **shared}
        return self.tx.update(updates, state, params, **extra)


def _summed(nest: Any) -> Any:
    leaves, structure = jax.tree.flatten(nest)
    replica = get_replica_context()
    assert replica is not None
    if leaves:
        leaves = replica.all_reduce(ReduceOp.SUM, leaves)
    return jax.tree.unflatten(structure, leaves)
