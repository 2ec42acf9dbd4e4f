"""Hints about programs that work but could be faster."""

from __future__ import annotations

import warnings

from replicax import cluster
from replicax._deprecation import frames_to_the_user
from replicax.errors import PerformanceHint


def hint(message: str) -> None:
    """Warn at the user's line; on the first worker only, since all run the same program."""
    session = cluster.session()
    if session is None or session.members.index == 0:
        warnings.warn(message, PerformanceHint, stacklevel=frames_to_the_user())
