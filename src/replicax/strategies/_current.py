"""Questions about the current context."""

from __future__ import annotations

from typing import Any

from replicax import _bridges, _context
from replicax._context import ContextKind
from replicax.errors import ContextError, InvalidType
from replicax.execution import ReplicaContext
from replicax.strategies._default import default_strategy
from replicax.strategies._strategy import Strategy


def get_strategy() -> Strategy:
    """Return the current strategy, which outside of every scope is the default one.

    >>> import replicax as rx
    >>> rx.get_strategy()
    the default strategy
    >>> with rx.OneDeviceStrategy("CPU:0").scope():
    ...     rx.get_strategy()
    OneDeviceStrategy(1)
    """
    strategy = _context.current().strategy
    return strategy if isinstance(strategy, Strategy) else default_strategy()


def has_strategy() -> bool:
    """Tell whether there is a strategy other than the default one."""
    return _context.current().strategy is not None


def in_cross_replica_context() -> bool:
    """Tell whether the code runs once for all replicas, as in a scope."""
    return _context.current().kind is not ContextKind.REPLICA


# The declared result is not `ReplicaContext | None`, because code given to `run` would have to rule
# out a None that it never gets. Nor is it `ReplicaContext` alone, because type checkers would treat
# the None branch of code that runs in both contexts as unreachable. With `Any` in place of None,
# they know the methods of a replica and accept the check.
def get_replica_context() -> ReplicaContext | Any:
    """Return the context of the replica whose code is running; None in cross-replica context."""
    frame = _context.current()
    if frame.kind is not ContextKind.REPLICA:
        return None
    if isinstance(frame.replica, ReplicaContext):
        return frame.replica
    return default_strategy().replica_context


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make `strategy` current until further notice, without a `with` block; None ends it.

    This is meant for notebooks, and is not allowed inside a scope.
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise InvalidType(
            f"`experimental_set_strategy` takes a strategy or None; got {strategy!r}."
        )
    if _context.in_scope():
        raise ContextError(
            "`experimental_set_strategy` was called inside a scope. Current context: "
            f"{_context.current()}. Leave the `with strategy.scope():` block first."
        )
    _context.install(None if strategy is None else strategy.identity)
    _bridges.follow()
