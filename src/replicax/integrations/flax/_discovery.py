"""Discovery of the NNX modules and variables that a function can reach.

NNX does not report when a variable is read, so a function is examined before it runs: its
arguments, its closure, the globals that its code names, and everything that these hold in turn.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from replicax._nest import AlwaysLeaf
from replicax.execution import Function, FunctionOfInstance
from replicax.execution._function_cache import contents_of
from replicax.input import DistributedIterator
from replicax.values import DistributedValues

# Objects from these packages hold no user modules, and a search in them would lead far afield.
_LIBRARIES = frozenset(
    {
        *sys.stdlib_module_names,
        "chex",
        "equinox",
        "flax",
        "grain",
        "jax",
        "jaxlib",
        "jaxtyping",
        "keras",
        "numpy",
        "optax",
        "orbax",
        "replicax",
        "tensorflow",
        "torch",
    }
)
# Functions from these packages are wrappers that close over the user's functions.
_WRAPPING = frozenset({"equinox", "flax", "functools", "replicax"})
_NOTHING_INSIDE = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type(...), np.ndarray, type, np.dtype}
)
_DATA = (
    jax.Array,
    jax.ShapeDtypeStruct,
    np.generic,
    DistributedValues,
    DistributedIterator,
    AlwaysLeaf,
)
_LOADING_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_LONGEST = 256  # a longer list is taken for a dataset and not searched for modules
_DEEPEST = 6  # levels of nested objects


@dataclass(frozen=True, slots=True)
class Reached:
    """A variable, its name, and the object that holds it."""

    variable: nnx.Variable
    name: str
    holder: object


@final
class Reach:
    """The objects that can be reached from some roots.

    `containers` maps ids to the lists and other containers that modules hold. `places` are
    functions that return the current contents of everything else that was searched.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.nodes: list[nnx.Pytree] = []
        self.variables: list[Reached] = []
        self.containers: dict[int, Any] = {}
        self.places: list[Callable[[], Iterable[Any]]] = []
        self._seen: set[int] = set()
        self._kept: list[object] = []  # so that ids stay valid
        for root in roots:
            self._visit(root, type(root).__name__, root, (), 0)
        if self.is_empty:
            self._kept.clear()  # nothing is kept alive for functions without modules

    @property
    def is_empty(self) -> bool:
        """True if there are no NNX objects."""
        return not self.nodes and not self.variables

    def _visit(self, value: Any, name: str, holder: Any, names: Sequence[str], depth: int) -> None:
        """Visit `value`, held by `holder`, on behalf of code that uses `names`."""
        kind = type(value)
        if not may_lead_somewhere(value) or id(value) in self._seen:
            return
        if kind is types.ModuleType:
            self._visit_module(value, names, depth)
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, nnx.Variable):
            self.variables.append(Reached(value, name, holder))
        elif isinstance(value, nnx.Pytree):
            self.nodes.append(value)
            for key, attribute in sorted(vars(value).items()):  # NNX changes their order
                self._visit(attribute, f"{name}.{key}", value, (), depth)
        elif isinstance(value, nnx.State):
            self._visit(value.raw_mapping, name, holder, names, depth)
        elif isinstance(value, (list, tuple, set, frozenset, dict)):
            self._visit_items(value, name, holder, names, depth)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, depth)
        elif isinstance(value, types.MethodType):
            self._visit(value.__func__, name, value.__self__, names, depth)
            self._visit_bound(value.__self__, value.__func__, depth)
        elif isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            self._visit_each(parts, name, value, names, depth)
        elif isinstance(value, Function):
            self._visit(value.python_function, name, value, names, depth)
        elif isinstance(value, FunctionOfInstance):
            self._visit(value.function, name, value, names, depth)
            self._visit_bound(value.instance, value.function.python_function, depth)
        elif callable(value) and (wrapped := _wrapped_by(value)) is not None:
            self._visit(wrapped, name, value, names, depth)  # e.g. by `nnx.jit`
        elif depth < _DEEPEST:
            self._visit_object(value, name, names, depth + 1)

    def _visit_each(
        self, values: Iterable[object], name: str, holder: object, names: Sequence[str], depth: int
    ) -> None:
        for value in values:
            self._visit(value, name, holder, names, depth)

    def _visit_items(
        self, value: Any, name: str, holder: Any, names: Sequence[str], depth: int
    ) -> None:
        if len(value) > _LONGEST:
            return
        if isinstance(holder, nnx.Pytree):
            self.containers[id(value)] = value
        else:
            self.places.append(lambda: items_of(value))
        keys = sorted(value, key=str) if isinstance(value, dict) else range(len(value))
        for key, item in zip(keys, items_of(value), strict=True):
            self._visit(item, f"{name}[{key!r}]", holder, names, depth)

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        library = _library(function)
        if library in _LIBRARIES and library not in _WRAPPING:
            return
        names = _names_in(function.__code__)
        inside = [*(function.__closure__ or ())]
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self.places.append(lambda: [contents_of(cell) for cell in inside])
        for cell, name in zip(inside, function.__code__.co_freevars, strict=True):
            self._visit(contents_of(cell), name, function, names, depth)
        self._visit_each(defaults, function.__name__, function, names, depth)
        wrapped = _wrapped_by(function)
        self._visit(wrapped, function.__name__, function, names, depth)
        if library in _LIBRARIES:
            return
        known = function.__globals__
        named = [name for name in _globals_in(function.__code__) if name in known]
        self.places.append(lambda: [known.get(name) for name in named])
        for name in named:
            self._visit(known[name], name, function, names, depth)

    def _visit_bound(self, instance: object, function: object, depth: int) -> None:
        code = getattr(function, "__code__", None)
        names = () if code is None else _names_in(code)
        self._visit(instance, type(instance).__name__, instance, names, depth)

    def _visit_module(self, module: types.ModuleType, names: Sequence[str], depth: int) -> None:
        if module.__name__.partition(".")[0] in _LIBRARIES:
            return
        held = vars(module)
        named = [name for name in names if name in held]
        self.places.append(lambda: [held.get(name) for name in named])
        for name in named:
            self._visit(held[name], name, module, names, depth)

    def _visit_object(self, value: object, name: str, names: Sequence[str], depth: int) -> None:
        kind = type(value)
        plain = isinstance(value, types.SimpleNamespace)
        if isinstance(value, Tracer) or not (plain or _library(kind) not in _LIBRARIES):
            return
        for method in ("__call__", *names):  # methods use globals of their own
            function = getattr(kind, method, None)
            if isinstance(function, (types.FunctionType, Function)):
                self._visit(function, method, value, names, depth)
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self.places.append(held.values)
            for key, attribute in list(held.items()):
                self._visit(attribute, f"{name}.{key}", value, names, depth)


def items_of(container: Any) -> list[object]:
    """Return the items of a container; for a dict, its values sorted by key."""
    if isinstance(container, dict):
        return [container[key] for key in sorted(container, key=str)]
    return list(container)


def may_lead_somewhere(value: object) -> bool:
    """Tell whether anything can be reached from `value`."""
    return _objects_may_lead_somewhere(type(value))


@functools.cache
def _objects_may_lead_somewhere(cls: type) -> bool:
    """Tell whether anything can be reached from objects of a class; cached because it is slow."""
    return cls not in _NOTHING_INSIDE and not issubclass(cls, (*_DATA, Tracer, type))


def _wrapped_by(value: object) -> object:
    """Return the object that `value` wraps, without `getattr`: some objects invent attributes."""
    return getattr(value, "__dict__", {}).get("__wrapped__")


def _library(value: object) -> str:
    """Return the package in which a function or a class was defined."""
    return (getattr(value, "__module__", None) or "").partition(".")[0]


@functools.lru_cache(maxsize=1024)
def _globals_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals that some code reads, including those read by nested functions.

    `co_names` also has attributes: with it, a step that calls `nnx.state` would reach a global
    `state`, such as the training loop's, which is replaced at every step.
    """
    loaded = (each for each in dis.get_instructions(code) if each.opname in _LOADING_GLOBALS)
    names = dict.fromkeys(each.argval for each in loaded)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_globals_in(constant)))
    return tuple(names)


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the globals and attributes that some code names, including in nested functions."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(_names_in(constant)))
    return tuple(names)
