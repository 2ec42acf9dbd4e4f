"""What a function with a loop over a dataset gives to `run`, compiled."""

from __future__ import annotations

import types
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, final

from replicax.errors import PerformanceHint

_MANY_VARIANTS = 16


class Compiled(Protocol):
    """A function that `run` compiles."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@final
class CompiledRuns:
    """Keeps programs between steps and epochs.

    The function given to `run` is usually defined inside of the loop, or of the function around it,
    and is a new object each time. It is known again by its code and by what it closes over.
    """

    def __init__(self, compile: Callable[[Callable[..., Any]], Compiled]) -> None:
        self._compile = compile
        self._known: dict[Any, Compiled] = {}
        self._variants: Counter[Any] = Counter()

    def compiled(self, fn: Callable[..., Any]) -> Compiled:
        """`fn` as something that `run` compiles; what it was before, if it does the same."""
        key = _identity(fn)
        if key in self._known:
            return self._known[key]
        code = getattr(fn, "__code__", fn)
        self._variants[code] += 1
        if self._variants[code] > _MANY_VARIANTS:
            return self._compile(fn)  # another one every time, and not worth keeping
        if self._variants[code] == _MANY_VARIANTS:
            warnings.warn(
                f"`{getattr(fn, '__qualname__', fn)}`, given to `run` in a loop over a dataset, "
                f"has closed over other values {_MANY_VARIANTS} times, and is compiled anew each "
                "time, which is slow. Pass what changes as an argument: "
                "`strategy.run(fn, args=(batch, value))`.",
                PerformanceHint,
                stacklevel=5,
            )
        # It holds `fn`, and with it everything that is known by its identity.
        self._known[key] = self._compile(fn)
        return self._known[key]


def _identity(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Equal for functions that do the same, as far as can be told."""
    if isinstance(value, types.MethodType):
        return _identity(value.__func__, within), id(value.__self__)
    if isinstance(value, types.FunctionType) and id(value) not in within:
        within = (*within, id(value))
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        captured = tuple(_contents(cell) for cell in value.__closure__ or ())
        return value.__code__, tuple(_identity(part, within) for part in (*defaults, *captured))
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value), value
    return id(value)


_EMPTY = object()


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _EMPTY
