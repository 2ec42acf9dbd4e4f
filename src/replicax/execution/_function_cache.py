"""The cache of compiled functions, in which a function that is passed again is found."""

from __future__ import annotations

import functools
import itertools
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, final

from replicax._hints import hint

_MOST = 64  # functions whose programs are kept: the most recently used
_MANY = 16  # functions of the same code, after which the hint is given


class Compiled(Protocol):
    """A function that `run` compiles."""

    def __call__(self, *args: object, **kwargs: object) -> Any: ...


class Identity(Protocol):
    """A rule that decides which functions are the same."""

    def __call__(self, fn: Callable[..., object]) -> tuple[Any, Any]:
        """Return a key, equal for the same functions, and the objects whose ids it contains."""
        ...


@final
class FunctionCache:
    """Compiled functions, by the functions that they were made from.

    Args:
      compile: Makes a compiled function.
      identity: Tells whether a function has been seen before.
      advice: How a program can avoid passing a new function each time. It is the end of a hint
        that begins with the name of the function, and has a place for the number of functions.
    """

    def __init__(
        self, compile: Callable[[Callable[..., Any]], Any], identity: Identity, advice: str
    ) -> None:
        self._compile, self._identity, self._advice = compile, identity, advice
        self._known: dict[Any, tuple[Any, Any]] = {}
        self._same_code: Counter[Any] = Counter()

    def compiled(self, fn: Callable[..., object]) -> Any:
        """Return the compiled form of `fn`: the earlier one, if `fn` has been seen before."""
        key, held = self._identity(fn)
        found = self._known.pop(key, None)
        if found is None:
            # Objects that the key knows by id must outlive it, or their ids could be reused.
            found = self._compile(fn), held
            self._count(fn)
        self._known[key] = found  # as the most recent one
        if len(self._known) > _MOST:
            self._known.pop(next(iter(self._known)), None)
        return found[0]

    def _count(self, fn: Callable[..., object]) -> None:
        code = _code_of(fn)
        self._same_code[code] += 1
        if self._same_code[code] == _MANY:
            hint(
                f"`{getattr(fn, '__qualname__', fn)}`, given to `run`, {self._advice.format(_MANY)}"
            )


def _code_of(fn: object) -> object:
    """Return the code of a function, or the class of another callable object."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__code__", type(fn))


def by_object(fn: Callable[..., object]) -> tuple[Any, Any]:
    """Tell functions apart as objects: two objects are never the same, whatever they do.

    A new one may have been made because a global variable or an object that it uses has changed.
    """
    key = (fn.__func__, id(fn.__self__)) if isinstance(fn, types.MethodType) else id(fn)
    return key, fn


def by_closure(fn: Callable[..., object]) -> tuple[Any, Any]:
    """Tell functions apart by their code and by what they close over.

    This is for functions that are defined in a loop, or in the function around it, and are new
    objects each time.
    """
    closure = _Closure()
    # `fn` does not keep captured objects alive: it shares its closure with the loop, which puts
    # other values there.
    return closure.key_of(fn), closure.held


class _Closure:
    """The identity of a function; `held` has the objects that the key knows by id."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self._within: list[Any] = []

    def key_of(self, value: object) -> Any:
        if isinstance(value, types.MethodType):
            return "method", self.key_of(value.__func__), self._by_id(value.__self__)
        if isinstance(value, functools.partial):
            arguments = [*value.args, *itertools.chain.from_iterable(value.keywords.items())]
            parts = tuple(self.key_of(part) for part in arguments)
            return "partial", self.key_of(value.func), parts
        if isinstance(value, types.FunctionType):
            if value in self._within:  # it is recursive
                return "within", self._within.index(value)
            self._within.append(value)
            named = itertools.chain.from_iterable(sorted((value.__kwdefaults__ or {}).items()))
            defaults = (*(value.__defaults__ or ()), *named)
            captured = (contents_of(cell) for cell in value.__closure__ or ())
            parts = tuple(self.key_of(part) for part in (*defaults, *captured))
            self._within.pop()
            return value.__code__, self._by_id(value.__globals__), parts
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return type(value), repr(value)  # `repr` tells -0.0 from 0.0
        return self._by_id(value)

    def _by_id(self, value: object) -> int:
        self.held.append(value)
        return id(value)


_EMPTY = object()


def contents_of(cell: types.CellType) -> Any:
    """Return the contents of a closure's cell, or a unique object if nothing is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY
