"""Questions about the current context."""

from __future__ import annotations

from replicax import _bridges, _context
from replicax._context import Kind
from replicax.errors import ContextError, InvalidType
from replicax.execution import ReplicaContext
from replicax.strategies._default import default_strategy
from replicax.strategies._strategy import Strategy


def get_strategy() -> Strategy:
    """The current strategy; outside every scope the default one.

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
    """Whether there is a strategy other than the default one."""
    return _context.current().strategy is not None


def in_cross_replica_context() -> bool:
    """Whether the code runs once for all replicas, as in a scope."""
    return _context.current().kind is not Kind.REPLICA


def get_replica_context() -> ReplicaContext | None:
    """The replica whose code this is; None in cross-replica context."""
    frame = _context.current()
    if frame.kind is not Kind.REPLICA:
        return None
    if isinstance(frame.replica, ReplicaContext):
        return frame.replica
    return default_strategy().replica_context


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes `strategy` current until told otherwise, without a `with` block; None ends it.

    Meant for notebooks. Not allowed inside a scope.
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
