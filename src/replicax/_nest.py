"""Nests as replicax sees them: pytrees in which a variable is one leaf.

Mappings, dict subclasses, dataclasses and `attrs` classes are nests too (`_containers.py`).

To JAX, a variable is its value, so that it can be given to any `jax.numpy` function or to a jitted
one; taking a nest apart with `jax.tree` would lose the variable. These functions keep it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
from jax.tree_util import PyTreeDef

from replicax._containers import has_no_container, is_container, opened
from replicax._typing import Leaf, Nest

if TYPE_CHECKING:
    from jax.tree_util import KeyPath


class AlwaysLeaf:
    """Base of objects that are leaves here, although JAX takes them apart."""

    __slots__ = ()


# Opaque classes are classes of other libraries whose objects have an identity but are pytrees too.
# Functions receive and return the objects whole; where arrays are combined, they are nests like
# any other.
_opaque_classes: tuple[type, ...] = ()


def register_opaque(kind: type) -> None:
    """Treat objects of a class as leaves where a function gets or returns them."""
    global _opaque_classes
    _opaque_classes = (*_opaque_classes, kind)
    _is_opaque_class.cache_clear()


def is_opaque(value: object) -> bool:
    return _is_opaque_class(type(value))


# This compares parents: `issubclass` of an `abc` class looks at all of its subclasses, which for
# those of NNX takes longer than all other handling of the arguments of a first step.
@functools.cache
def _is_opaque_class(cls: type) -> bool:
    return not set(_opaque_classes).isdisjoint(cls.__mro__)


def _is_leaf(node: object) -> bool:
    return isinstance(node, AlwaysLeaf)


def _is_one(node: object) -> bool:
    return isinstance(node, AlwaysLeaf) or _is_opaque_class(type(node))


def flatten(
    nest: Nest, *, keep_opaque: bool = False, everything: bool = False
) -> tuple[list[Leaf], PyTreeDef]:
    """Return the leaves and the structure.

    With `keep_opaque`, which is for arguments and results of functions, objects of opaque classes
    are leaves. Containers that JAX does not know are taken apart if they hold only data or, with
    `everything`, always.
    """
    leaves, structure = jax.tree.flatten(nest, is_leaf=_leaf_test(keep_opaque))
    if has_no_container(leaves):
        return leaves, structure
    return jax.tree.flatten(_opened(nest, keep_opaque, everything), is_leaf=_leaf_test(keep_opaque))


def flatten_with_paths(
    nest: Nest, *, keep_opaque: bool = False, everything: bool = False
) -> tuple[list[tuple[str, Leaf]], PyTreeDef]:
    """Return the leaves, each with its path in the nest, such as `['loss']`."""
    found, structure = jax.tree_util.tree_flatten_with_path(
        _opened(nest, keep_opaque, everything), is_leaf=_leaf_test(keep_opaque)
    )
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in found], structure


def flatten_with_keys(nest: Nest) -> tuple[list[tuple[KeyPath, Leaf]], PyTreeDef]:
    """Return the leaves of all containers, each with the JAX keys that lead to it."""
    return jax.tree_util.tree_flatten_with_path(
        _opened(nest, keep_opaque=False, everything=True), is_leaf=_leaf_test(keep_opaque=False)
    )


def leaves(nest: Nest, *, keep_opaque: bool = False) -> list[Leaf]:
    return flatten(nest, keep_opaque=keep_opaque)[0]


def transform(
    function: Callable[..., object],
    nest: Nest,
    *others: Nest,
    keep_opaque: bool = False,
    everything: bool = False,
) -> Nest:
    nests = [_opened(each, keep_opaque, everything) for each in (nest, *others)]
    return jax.tree.map(function, *nests, is_leaf=_leaf_test(keep_opaque))


def is_leaf(value: object) -> bool:
    if _is_leaf(value):
        return True
    container = is_container(value, data_only=True, is_leaf=_is_leaf)
    return jax.tree_util.all_leaves([value]) and not container


def _leaf_test(keep_opaque: bool) -> Callable[[object], bool]:
    return _is_one if keep_opaque else _is_leaf


def _opened(nest: Nest, keep_opaque: bool, everything: bool) -> Nest:
    return opened(nest, data_only=not everything, is_leaf=_leaf_test(keep_opaque))
