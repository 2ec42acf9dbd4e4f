"""Ray, which is optional and imported when it is first needed."""

from __future__ import annotations

import os
import sys
from typing import Any

from replicax.errors import MissingLibrary

_MODE = "RAY_AUTH_MODE"


def ray() -> Any:
    """Return the module `ray`."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingLibrary(
            "Parameter servers run on Ray, which is not installed: pip install 'replicax[ray]'."
        ) from error
    return ray


def use_tokens() -> None:
    """Make this process, and those that it starts, use Ray's token authentication."""
    was_imported = "ray" in sys.modules
    if os.environ.get(_MODE) == "token":
        return
    os.environ[_MODE] = "token"
    if was_imported:
        # Ray reads the mode when it is imported. This is how `ray.init()` turns it on by itself
        # for the clusters that it starts, in Ray 2.60; it has no public function for it.
        ray()._raylet.Config.initialize("")
