"""Names that work, and that new programs should not use."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Owner = TypeVar("Owner")
Result = TypeVar("Result")
Method = Callable[Concatenate[Owner, Parameters], Result]

_said: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def deprecated(
    instead: str,
) -> Callable[[Method[Owner, Parameters, Result]], Method[Owner, Parameters, Result]]:
    """Makes a method warn, once for each object, of what to use instead."""

    def decorate(
        method: Method[Owner, Parameters, Result],
    ) -> Method[Owner, Parameters, Result]:
        name = method.__name__

        @functools.wraps(method)
        def warning(self: Owner, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            said = _said.setdefault(self, set())
            if name not in said:
                said.add(name)
                warnings.warn(
                    f"`{name}` is deprecated, here as in the reference. {instead}",
                    DeprecationWarning,
                    stacklevel=frames_to_the_user(),
                )
            return method(self, *args, **kwargs)

        return warning

    return decorate


def frames_to_the_user() -> int:
    """Return how many frames up the code is that is not ours, for `warnings.warn` of the caller."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "replicax"
