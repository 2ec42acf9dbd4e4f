"""The reasons why a checkpoint could not be written or read, without foreign tracebacks."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, final

_LONGEST = 500  # characters per reason
_CODE = re.compile(r"os_error_code='(\d+)'")  # in the errors of TensorStore


def system_error(error: BaseException) -> OSError | None:
    """Return the operating system's error behind an error, if there is one.

    It has no traceback: a hundred lines of Orbax and asyncio say nothing about a full disk.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            seen.__cause__ = seen.__context__ = None
            return seen.with_traceback(None)
        if code := _CODE.search(str(seen)):
            return OSError(int(code[1]), os.strerror(int(code[1])))
        seen = seen.__cause__ or seen.__context__
    return None


def reason(error: BaseException) -> str:
    """Return an error as part of a sentence."""
    first = (str(error).splitlines() or [""])[0].strip()
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text[:_LONGEST].removesuffix(".")


@contextlib.contextmanager
def orbax_silent() -> Iterator[None]:
    """Keep messages of Orbax and TensorStore off stderr for errors that they also raise."""
    logger = logging.getLogger("absl")
    logger.addFilter(_not_of_orbax)
    usual = sys.unraisablehook
    ours = None if isinstance(usual, _WithoutLateWrites) else _WithoutLateWrites(usual)
    sys.unraisablehook = ours or usual
    try:
        yield
        # After a failure the hook stays, because other arrays are still being written.
        if sys.unraisablehook is ours:
            sys.unraisablehook = usual
    finally:
        logger.removeFilter(_not_of_orbax)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return record.exc_info is None or "orbax" not in record.pathname


@final
class _WithoutLateWrites:
    """A `sys.unraisablehook` that ignores writes that end after the save has failed.

    Orbax closes its event loop at the first error, and TensorStore complains about that in its
    threads: six lines per array.
    """

    def __init__(self, usual: Callable[[Any], Any]) -> None:
        self._usual = usual

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self._usual(unraisable)
