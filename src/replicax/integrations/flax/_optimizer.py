"""Reduction of the replicas' gradients for `nnx.Optimizer`.

The class is patched rather than each optimizer, because a step may rebuild its optimizer
(`nnx.merge`, `nnx.jit`), create one, or use a class of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from replicax import _context
from replicax._context import ContextKind
from replicax._typing import Nest
from replicax.errors import InvalidArgument, MeetingInTrace
from replicax.execution import Site, warn_once
from replicax.strategies import get_replica_context

_OF_THE_LOSS = ("value", "grad")  # extra arguments that are sums over the batch, as gradients are


@final
@dataclass(frozen=True)
class Summing:
    """A transformation that is applied to the sum of the replicas' gradients.

    A replica that reads `tx` of an `nnx.Optimizer` gets this one.
    """

    tx: optax.GradientTransformation

    def init(self, params: Nest) -> Any:
        return self.tx.init(params)

    def update(self, updates: Nest, state: Any, params: Nest = None, **extra: Nest) -> Any:
        if not _several_replicas():  # the user kept it and calls it elsewhere
            return self.tx.update(updates, state, params, **extra)
        if "value_fn" in extra:
            raise InvalidArgument(
                "`update` of an nnx.Optimizer got `value_fn` in a function given to `run`: a "
                "line search, for which every replica would see its own part of the batch. "
                "Use an optimizer without one, or search outside of `run`."
            )
        shared = {name: extra[name] for name in _OF_THE_LOSS if name in extra}
        try:
            updates, shared = _summed((updates, shared))
        except MeetingInTrace as error:
            raise MeetingInTrace(
                "`update` of an nnx.Optimizer was called inside a JAX transformation (such as "
                "`nnx.jit`, `jax.jit` or `nnx.scan`) in a function that replicas run eagerly. It "
                "sums gradients over the replicas (`all_reduce`), which cannot meet inside a "
                "program of one of them. Use `rx.function(step)` instead of `nnx.jit(step)`."
            ) from error
        program = _context.current().program
        if program is not None and program.skips_computing():
            # Copies, because new arrays show that the update writes the state.
            return jax.tree.map(jnp.copy, (updates, state))
        return self.tx.update(updates, state, params, **{**extra, **shared})


def install() -> None:
    """Make every `nnx.Optimizer` give replicas a `tx` that sums.

    Every `update` reads `tx`, including that of a subclass. The stored attribute is unchanged, so
    `nnx.split` and programs see the user's transformation.
    """
    nnx.Optimizer.tx = property(_get_tx, _set_tx, _delete_tx)  # pyright: ignore[reportAttributeAccessIssue]


def _get_tx(self: nnx.Optimizer) -> object:
    if "tx" not in vars(self):
        raise AttributeError(f"{type(self).__name__!r} object has no attribute 'tx'")
    tx = vars(self)["tx"]
    return Summing(tx) if _several_replicas() else tx


def _set_tx(self: nnx.Optimizer, tx: object) -> None:
    vars(self)["tx"] = tx.tx if isinstance(tx, Summing) else tx


def _delete_tx(self: nnx.Optimizer) -> None:
    del vars(self)["tx"]


def _several_replicas() -> bool:
    frame = _context.current()
    if frame.kind is not ContextKind.REPLICA or frame.strategy is None or frame.replica is None:
        return False
    return frame.replica.num_replicas_in_sync > 1


def _summed(nest: object) -> Any:
    """Return the gradients of all replicas, reduced as the strategy specifies."""
    replica = get_replica_context()
    assert replica is not None
    return replica.reduce_gradients(nest, report=_warn)


def _warn(site: Site) -> None:
    warn_once(
        None,
        "`update` of an nnx.Optimizer",
        'To have them applied as they are, set `strategy.gradient_reduction = "NONE"`.',
        site,
    )
