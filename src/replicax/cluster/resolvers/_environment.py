"""Environment variables that have to be there."""

from __future__ import annotations

import os

from replicax.cluster._spec import as_index, shown
from replicax.errors import ClusterError


def required(*names: str, advice: str) -> str:
    """The first of these variables that is set.

    Args:
      names: Variables that say the same, the best first.
      advice: What to do if none is set, as a sentence.
    """
    for name in names:
        if os.environ.get(name):
            return os.environ[name]
    raise ClusterError(
        f"The environment variable {' or '.join(names)} is needed to find the cluster; it is not "
        f"set. {advice}"
    )


def required_number(*names: str, advice: str) -> int:
    """The same for a variable that is a number, 0 or more."""
    text = required(*names, advice=advice)
    number = as_index(text)
    if number is None:
        raise ClusterError(
            f"The environment variable {' or '.join(names)} is a number, 0 or more; got "
            f"{shown(text)}. {advice}"
        )
    return number
