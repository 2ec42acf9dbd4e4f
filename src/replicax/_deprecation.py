"""Names that still work, but that new programs should not use."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from replicax._once import first_time

Parameters = ParamSpec("Parameters")
Owner = TypeVar("Owner")
Result = TypeVar("Result")
Method = Callable[Concatenate[Owner, Parameters], Result]


def deprecated(
    instead: str,
) -> Callable[[Method[Owner, Parameters, Result]], Method[Owner, Parameters, Result]]:
    """Make a method warn, once per object, and name its replacement."""

    def decorate(
        method: Method[Owner, Parameters, Result],
    ) -> Method[Owner, Parameters, Result]:
        name = method.__name__

        @functools.wraps(method)
        def warning(self: Owner, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if first_time(name, about=self):
                warnings.warn(
                    f"`{name}` is deprecated, here as in the reference. {instead}",
                    DeprecationWarning,
                    stacklevel=frames_to_the_user(),
                )
            return method(self, *args, **kwargs)

        return warning

    return decorate


def frames_to_the_user() -> int:
    """Return the `stacklevel` that makes the caller's `warnings.warn` point at the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "replicax"
