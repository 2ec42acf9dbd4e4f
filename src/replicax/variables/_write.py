"""The three writes that a variable supports."""

from __future__ import annotations

import enum
from typing import Any, final


@final
class Write(enum.Enum):
    """The kinds of writes; the values are the names of the methods that users call."""

    ASSIGN = "assign"
    ADD = "assign_add"
    SUB = "assign_sub"

    def applied(self, old: Any, new: Any) -> Any:
        """Return the value after the write."""
        if self is Write.ASSIGN:
            return new
        return old + new if self is Write.ADD else old - new
