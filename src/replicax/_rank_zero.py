"""Rank 0, called the first worker here: `rx.print` and `rx.is_first_worker`."""

from __future__ import annotations

import builtins
from typing import Any

from replicax import cluster


def is_first_worker() -> bool:
    """Tell whether this process is the first worker, or the only one.

    Use it for what should happen once, such as logging, but not for anything in which workers must
    take part together, such as `strategy.reduce` or reading an ON_READ variable.

    >>> import replicax as rx
    >>> rx.is_first_worker()
    True
    """
    session = cluster.session()
    return session is None or session.members.index == 0


def print(*values: Any, **keywords: Any) -> None:
    """Call Python's `print`, on the first worker only.

    >>> import replicax as rx
    >>> rx.print("loss", 0.5)
    loss 0.5
    """
    if is_first_worker():
        builtins.print(*values, **keywords)
