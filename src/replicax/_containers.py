"""Containers that JAX takes for leaves: mappings, dict subclasses, dataclasses, `attrs` classes.

`opened` dresses them for `jax.tree`, which then takes them apart; putting together again gives an
object of their own class. Nothing is registered with JAX, where a class can be registered once, and
the user may want to.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import numpy as np

from replicax.errors import InvalidType

# Classes of these are known to JAX where they hold data; the others are settings and the like.
_OWN_LIBRARIES = ("jax", "jaxlib", "numpy", "replicax")
_DATA = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, jax.ShapeDtypeStruct)

IsLeaf = Callable[[Any], bool]


class _Kind(ABC):
    """How containers of one class are taken apart and put together."""

    @abstractmethod
    def names(self, value: Any) -> tuple[Any, ...]:
        """The names of what it holds, in an order of their own."""

    @abstractmethod
    def get(self, value: Any, name: Any) -> Any: ...

    @abstractmethod
    def key(self, name: Any) -> Any:
        """How a path shows the name."""

    @abstractmethod
    def build(self, cls: type, names: Sequence[Any], values: Sequence[Any]) -> Any: ...


@final
class _MappingKind(_Kind):
    def names(self, value: Any) -> tuple[Any, ...]:
        try:
            return tuple(sorted(value))  # as those of a dict, whose order says nothing
        except TypeError:
            return tuple(value)

    def get(self, value: Any, name: Any) -> Any:
        return value[name]

    def key(self, name: Any) -> Any:
        return jax.tree_util.DictKey(name)

    def build(self, cls: type, names: Sequence[Any], values: Sequence[Any]) -> Any:
        content = dict(zip(names, values, strict=True))
        try:
            return cls(content)
        except TypeError as error:
            raise InvalidType(
                f"A {cls.__qualname__} was taken apart and cannot be made again by "
                f"`{cls.__qualname__}(dict)`: {error}. Use a dict, or register the class: "
                "`jax.tree_util.register_pytree_node`."
            ) from error


@final
class _RecordKind(_Kind):
    """Of a dataclass, or a class made by `attrs`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def names(self, value: Any) -> tuple[Any, ...]:
        return self._names

    def get(self, value: Any, name: Any) -> Any:
        return getattr(value, name)

    def key(self, name: Any) -> Any:
        return jax.tree_util.GetAttrKey(name)

    def build(self, cls: type, names: Sequence[Any], values: Sequence[Any]) -> Any:
        # Without `__init__`, which may check or convert what is a tracer or a per-replica value.
        record = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(record, name, value)
        return record


_MAPPING = _MappingKind()
_kinds: dict[type, _Kind] = {}
_plain: set[type] = set()  # the classes that were seen, and are no containers


def has_none(leaves: Sequence[Any]) -> bool:
    """Whether no leaf can be a container: 0.4 us for a batch, as it is asked for every step."""
    return set(map(type, leaves)) <= _plain


def _kind_of(value: Any) -> _Kind | None:
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
        return _MAPPING
    if dataclasses.is_dataclass(cls):
        return _RecordKind([field.name for field in dataclasses.fields(cls)])
    if (attributes := getattr(cls, "__attrs_attrs__", None)) is not None:
        return _RecordKind([attribute.name for attribute in attributes])
    return None


def is_container(value: Any, *, data_only: bool, is_leaf: IsLeaf) -> bool:
    """Whether JAX takes `value` for a leaf, and it is one of these.

    With `data_only`, a record is not if it is more than data: if it holds variables or other
    objects that stay whole, or attributes besides its fields, or no numbers at all. A function that
    is given such an object expects the object itself.
    """
    kind = _kind_of(value)
    if kind is None or is_leaf(value):
        return False
    if not data_only or isinstance(kind, _MappingKind):
        return True
    names = kind.names(value)
    if not set(getattr(value, "__dict__", ())) <= set(names):
        return False
    inner = opened([kind.get(value, name) for name in names], data_only=True, is_leaf=is_leaf)
    leaves = jax.tree.leaves(inner, is_leaf=is_leaf)
    return any(map(_is_data, leaves)) and not any(map(is_leaf, leaves))


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, _DATA) or hasattr(type(leaf), "__jax_array__")


def opened(nest: Any, *, data_only: bool, is_leaf: IsLeaf) -> Any:
    """Return the nest such that `jax.tree` takes its containers apart; itself if it has none."""

    def is_one(leaf: Any) -> bool:
        return is_container(leaf, data_only=data_only, is_leaf=is_leaf)

    leaves = jax.tree.leaves(nest, is_leaf=is_leaf)
    if has_none(leaves) or not any(map(is_one, leaves)):
        return nest
    return jax.tree.map(
        lambda leaf: _Opened(leaf, data_only, is_leaf) if is_one(leaf) else leaf,
        nest,
        is_leaf=is_leaf,
    )


@final
class _Opened:
    """A container while `jax.tree` takes it apart; put together again, it is the container."""

    __slots__ = ("data_only", "is_leaf", "value")

    def __init__(self, value: Any, data_only: bool, is_leaf: IsLeaf) -> None:
        self.value, self.data_only, self.is_leaf = value, data_only, is_leaf

    def take_apart(self) -> tuple[list[tuple[Any, Any]], Any]:
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


def _put_together(description: tuple[type, tuple[Any, ...]], values: Iterable[Any]) -> Any:
    cls, names = description
    return _kinds[cls].build(cls, names, list(values))


jax.tree_util.register_pytree_with_keys(_Opened, _Opened.take_apart, _put_together)
