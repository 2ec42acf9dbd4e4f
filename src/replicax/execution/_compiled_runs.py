"""Functions given to `run` in a loop over elements, compiled."""

from __future__ import annotations

import functools
import itertools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, final

from replicax._hints import hint

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
        self._known: dict[Any, tuple[Compiled, list[Any]]] = {}
        self._variants: Counter[Any] = Counter()

    def compiled(self, fn: Callable[..., Any]) -> Compiled:
        """`fn` as something that `run` compiles; what it was before, if it does the same."""
        identity = _Identity()
        key = identity.of(fn)
        if key in self._known:
            return self._known[key][0]
        self._variants[identity.code] += 1
        if self._variants[identity.code] > _MANY_VARIANTS:
            return self._compile(fn)  # another one every time, and not worth keeping
        if self._variants[identity.code] == _MANY_VARIANTS:
            hint(
                f"`{getattr(fn, '__qualname__', fn)}`, given to `run` in a loop over elements, "
                f"has closed over other values {_MANY_VARIANTS} times, and is compiled anew each "
                "time, which is slow. Pass what changes as an argument: "
                "`strategy.run(fn, args=(batch, value))`."
            )
        # What is known by its id has to live as long as that means it. `fn` does not see to that:
        # its closure is shared with the loop, which puts other values there.
        self._known[key] = self._compile(fn), identity.held
        return self._known[key][0]


class _Identity:
    """Finds a key that is equal for functions that do the same, as far as can be told.

    `held` are the objects that the key knows by their id; `code` is the outermost code.
    """

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.code: Any = None
        self._within: list[Any] = []

    def of(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):
            return "method", self.of(value.__func__), self._by_id(value.__self__)
        if isinstance(value, functools.partial):
            arguments = [*value.args, *itertools.chain.from_iterable(value.keywords.items())]
            return "partial", self.of(value.func), tuple(self.of(part) for part in arguments)
        if isinstance(value, types.FunctionType) and value not in self._within:
            self._within.append(value)
            self.code = self.code or value.__code__
            defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            captured = (contents_of(cell) for cell in value.__closure__ or ())
            parts = tuple(self.of(part) for part in (*defaults, *captured))
            return value.__code__, self._by_id(value.__globals__), parts
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return type(value), repr(value)  # by which -0.0 is not 0.0
        return self._by_id(value)

    def _by_id(self, value: Any) -> int:
        self.held.append(value)
        self.code = self.code or type(value)
        return id(value)


_EMPTY = object()


def contents_of(cell: types.CellType) -> Any:
    """What a closure has there; something that is nothing else, if nothing is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY
