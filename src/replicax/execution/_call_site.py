"""Call sites: the current instruction of each function on the stack."""

from __future__ import annotations

import sys
from types import CodeType

CallSite = tuple[tuple[CodeType, int], ...]


def call_site(depth: int, until: str | None = None) -> CallSite:
    """Return the instructions that led to the function `depth` calls above the caller.

    Args:
      depth: How many of the innermost functions to leave out, in addition to this one.
      until: The name of the function at which to stop; by default the whole stack counts.
    """
    frame, path = sys._getframe(depth + 1), []
    while frame is not None and frame.f_code.co_name != until:
        path.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(path)
