"""Containers that JAX treats as leaves: mappings, dict subclasses, dataclasses, `attrs` classes.

`opened` wraps them for `jax.tree`, which then takes them apart; putting them together again gives
an object of the original class. The classes are not registered with JAX: that is possible only
once per class, and the user may want to do it.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import numpy as np

from replicax.errors import InvalidType

# JAX already knows the classes of these libraries that hold data; the others are settings and such.
_OWN_LIBRARIES = ("jax", "jaxlib", "numpy", "replicax")
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_BESIDE_ARRAYS = (type(None), bool, int, float, complex, str, bytes)

IsLeaf = Callable[[object], bool]


class _Kind(ABC):
    """The rules by which containers of one class are taken apart and put together."""

    @abstractmethod
    def is_more(self, value: object) -> bool:
        """Tell whether `value` has attributes that would be lost."""

    @abstractmethod
    def names(self, value: object) -> tuple[object, ...]:
        """Return the names of its contents, in an order that does not depend on the object."""

    @abstractmethod
    def get(self, value: object, name: object) -> object: ...

    @abstractmethod
    def key(self, name: object) -> Hashable:
        """Return the JAX key that shows the name in a path."""

    @abstractmethod
    def build(self, cls: type, names: Sequence[object], values: Sequence[object]) -> object: ...


@final
class _MappingKind(_Kind):
    """The rules of a mapping, which is rebuilt by calling its class with a dict."""

    def __init__(self, cls: type) -> None:
        self._ordered = issubclass(cls, OrderedDict)
        try:
            self._usual = set(getattr(cls({}), "__dict__", ()))
        except Exception:  # the class cannot be called with a dict, for whatever reason
            self._usual = None

    def is_more(self, value: object) -> bool:
        return self._usual is None or not set(getattr(value, "__dict__", ())) <= self._usual

    def names(self, value: Any) -> tuple[object, ...]:
        if self._ordered:
            return tuple(value)
        try:
            return tuple(sorted(value))  # as JAX does for a dict, whose order means nothing
        except TypeError:
            return tuple(value)

    def get(self, value: Any, name: Any) -> Any:
        return value[name]

    def key(self, name: object) -> Hashable:
        return jax.tree_util.DictKey(name)

    def build(self, cls: type, names: Sequence[object], values: Sequence[object]) -> object:
        content = dict(zip(names, values, strict=True))
        try:
            return cls(content)
        except Exception as error:
            raise InvalidType(
                f"A {cls.__qualname__} was taken apart and cannot be made again by "
                f"`{cls.__qualname__}(dict)`: {error}. Use a dict, or register the class: "
                "`jax.tree_util.register_pytree_node`."
            ) from error


@final
class _RecordKind(_Kind):
    """The rules of a dataclass, or of a class made by `attrs`."""

    def __init__(self, cls: type, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._derived = {
            name
            for parent in cls.__mro__
            for name, attribute in vars(parent).items()
            if isinstance(attribute, functools.cached_property)
        }

    def is_more(self, value: object) -> bool:
        own = set(getattr(value, "__dict__", ())) - self._derived
        return not own <= set(self._names)

    def names(self, value: object) -> tuple[object, ...]:
        return self._names

    def get(self, value: Any, name: Any) -> Any:
        return getattr(value, name)

    def key(self, name: object) -> Hashable:
        return jax.tree_util.GetAttrKey(name)

    def build(self, cls: type, names: Sequence[Any], values: Sequence[Any]) -> Any:
        # `__init__` is bypassed, as it may check or convert tracers and per-replica values.
        record = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(record, name, value)
        return record


_kinds: dict[type, _Kind] = {}
_plain: set[type] = set()  # the classes seen so far that are not containers


def has_no_container(leaves: Sequence[object]) -> bool:
    """Tell whether no leaf can be a container; this takes 0.4 us per batch, on every step."""
    return set(map(type, leaves)) <= _plain


def _kind_of(value: object) -> _Kind | None:
    cls = type(value)
    if cls not in _kinds and cls not in _plain:
        kind = _found_kind(cls)
        if kind is None:
            _plain.add(cls)
        else:
            _kinds[cls] = kind
    return _kinds.get(cls)


def _found_kind(cls: type) -> _Kind | None:
    if cls.__module__.partition(".")[0] in _OWN_LIBRARIES:
        return None
    if issubclass(cls, Mapping):
        return _MappingKind(cls)
    names = record_fields(cls)
    return None if names is None else _RecordKind(cls, names)


def record_fields(cls: type) -> list[str] | None:
    """Return the fields of a dataclass or an `attrs` class, or None for other classes."""
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    attributes = getattr(cls, "__attrs_attrs__", None)
    return None if attributes is None else [attribute.name for attribute in attributes]


def is_container(value: object, *, data_only: bool, is_leaf: IsLeaf) -> bool:
    """Tell whether `value` is a container that JAX takes for a leaf.

    With `data_only`, it must hold only arrays, numbers and strings: a function that is given an
    object with variables, plain objects, or attributes other than its fields expects the object
    itself.
    """
    kind = _kind_of(value)
    if kind is None or is_leaf(value):
        return False
    if not data_only:
        return all(_has(value, name, kind) for name in kind.names(value))
    found = _Found()
    return found.is_data(value, is_leaf) and found.arrays


class _Found:
    """The state of a search through a container."""

    def __init__(self) -> None:
        self.arrays = False
        self._within: list[int] = []

    def is_data(self, value: object, is_leaf: IsLeaf) -> bool:
        """Tell whether a nest holds nothing but data; note whether there are arrays."""
        for leaf in jax.tree.leaves(value, is_leaf=is_leaf):
            if isinstance(leaf, _ARRAYS) or hasattr(type(leaf), "__jax_array__"):
                if is_leaf(leaf):
                    return False
                self.arrays = True
            elif not isinstance(leaf, _BESIDE_ARRAYS) and not self._is_inner_data(leaf, is_leaf):
                return False
        return True

    def _is_inner_data(self, value: object, is_leaf: IsLeaf) -> bool:
        kind = _kind_of(value)
        if kind is None or is_leaf(value) or kind.is_more(value) or id(value) in self._within:
            return False
        self._within.append(id(value))
        try:
            return all(
                _has(value, name, kind) and self.is_data(kind.get(value, name), is_leaf)
                for name in kind.names(value)
            )
        finally:
            self._within.pop()


def _has(value: Any, name: Any, kind: _Kind) -> bool:
    """Tell whether a field has been set."""
    return isinstance(kind, _MappingKind) or hasattr(value, name)


def opened(nest: object, *, data_only: bool, is_leaf: IsLeaf) -> object:
    """Return the nest with its containers wrapped for `jax.tree`; unchanged if it has none."""

    def is_one(leaf: object) -> bool:
        return is_container(leaf, data_only=data_only, is_leaf=is_leaf)

    leaves = jax.tree.leaves(nest, is_leaf=is_leaf)
    if has_no_container(leaves) or not any(map(is_one, leaves)):
        return nest
    return jax.tree.map(
        lambda leaf: _Opened(leaf, data_only, is_leaf) if is_one(leaf) else leaf,
        nest,
        is_leaf=is_leaf,
    )


@final
class _Opened:
    """A wrapper that lets `jax.tree` take a container apart; put together, it is the container."""

    __slots__ = ("data_only", "is_leaf", "value")

    def __init__(self, value: object, data_only: bool, is_leaf: IsLeaf) -> None:
        self.value, self.data_only, self.is_leaf = value, data_only, is_leaf

    def take_apart(self) -> tuple[list[tuple[Hashable, object]], tuple[type, tuple[object, ...]]]:
        kind = _kind_of(self.value)
        assert kind is not None
        names = kind.names(self.value)
        children = [
            (
                kind.key(name),
                opened(kind.get(self.value, name), data_only=self.data_only, is_leaf=self.is_leaf),
            )
            for name in names
        ]
        return children, (type(self.value), names)


def _put_together(description: tuple[type, tuple[object, ...]], values: Iterable[object]) -> Any:
    cls, names = description
    return _kinds[cls].build(cls, names, list(values))


jax.tree_util.register_pytree_with_keys(_Opened, _Opened.take_apart, _put_together)
