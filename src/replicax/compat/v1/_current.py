"""The current strategy, for programs of v1."""

from __future__ import annotations

import functools
from typing import final

from replicax import strategies
from replicax.compat.v1._strategy import Strategy


def get_strategy() -> strategies.Strategy:
    """Return the current strategy; outside of every scope, the default one with v1's methods."""
    strategy = strategies.get_strategy()
    return _default_strategy() if strategy.identity is None else strategy


@final
class _DefaultStrategy(Strategy):
    """The default strategy with the interface of v1, made of the same parts."""

    def __init__(self) -> None:
        super().__init__(strategies.get_strategy().extended)

    @property
    def identity(self) -> None:
        return None

    def __repr__(self) -> str:
        return "the default strategy"


@functools.lru_cache(maxsize=1)
def _default_strategy() -> _DefaultStrategy:
    return _DefaultStrategy()
