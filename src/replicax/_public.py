"""Publication of names that private files define."""

from __future__ import annotations

import types
from typing import Any


def publish(namespace: dict[str, Any]) -> None:
    """Make names claim a public module as theirs: in tracebacks, `repr` and documentation.

    Args:
      namespace: The `globals()` of a public module.
    """
    for name in namespace.get("__all__", [name for name in namespace if name[0] != "_"]):
        thing = namespace[name]
        if isinstance(thing, (type, types.FunctionType)) and "._" in thing.__module__:
            thing.__module__ = namespace["__name__"]
