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
    """Return the current strategy; outside every scope the default one.

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


# To type checkers the result is not `ReplicaContext | None`: the code given to `run` would need to
# rule out a None that it never gets. Nor is it `ReplicaContext` alone: they would take code for
# unreachable that asks for None because it runs in both contexts. With `Any` in the place of None
# they know the methods of a replica and accept the question.
def get_replica_context() -> ReplicaContext | Any:
    """Return the replica whose code this is; None in cross-replica context."""
    frame = _context.current()
    if frame.kind is not ContextKind.REPLICA:
        return None
    if isinstance(frame.replica, ReplicaContext):
        return frame.replica
    return default_strategy().replica_context


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make `strategy` current until further notice, without a `with` block; None ends it.

    This is meant for notebooks, and not allowed inside a scope.
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
