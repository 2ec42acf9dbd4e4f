"""Patches: attributes of Keras that are temporarily replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

_INHERITED = object()


@final
class Patches:
    """The replaced attributes, to be put back in reverse order."""

    def __init__(self) -> None:
        self._before: list[tuple[object, str, object]] = []

    def replace(self, owner: object, name: str, wrap: Callable[[Any], object]) -> None:
        """Replace `owner.name` with `wrap(owner.name)`."""
        self._before.append((owner, name, vars(owner).get(name, _INHERITED)))
        setattr(owner, name, wrap(getattr(owner, name)))

    def undo(self) -> None:
        """Put back the original objects."""
        while self._before:
            owner, name, before = self._before.pop()
            if before is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
