"""Nests as replicax sees them: pytrees in which a variable is one leaf.

Mappings, dict subclasses, dataclasses and `attrs` classes are nests too (`_containers.py`).

To JAX, a variable is its value, so that it can be given to any `jax.numpy` function or to a jitted
one; taking a nest apart with `jax.tree` would lose the variable. These functions keep it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from replicax._containers import has_none, is_container, opened
from replicax._typing import Nest


class Whole:
    """Base of objects that stay in one piece here, although JAX takes them apart."""

    __slots__ = ()


# Classes of other libraries whose objects have an identity, and are pytrees as well. Functions get
# them, and return them, as they are; where arrays are combined, they are nests like others.
_handed_whole: tuple[type, ...] = ()


def hand_whole(kind: type) -> None:
    """Has objects of a class stay in one piece where they are handed to a function, or back."""
    global _handed_whole
    _handed_whole = (*_handed_whole, kind)
    _is_class_handed_whole.cache_clear()


def is_handed_whole(value: Any) -> bool:
    return _is_class_handed_whole(type(value))


# By the parents: `issubclass` of a class of `abc` looks at all of its children, which for those of
# NNX takes longer than all else that is done with the arguments of a first step.
@functools.cache
def _is_class_handed_whole(cls: type) -> bool:
    return not set(_handed_whole).isdisjoint(cls.__mro__)


def _is_whole(node: Any) -> bool:
    return isinstance(node, Whole)


def _is_one(node: Any) -> bool:
    return isinstance(node, Whole) or _is_class_handed_whole(type(node))


def flatten(nest: Nest, *, handed: bool = False, everything: bool = False) -> tuple[list[Any], Any]:
    """Return the leaves and the structure.

    Of what is `handed` to a function, or back, objects stay what they are. Containers that JAX does
    not know are taken apart if they are data and nothing else, or with `everything` in any case.
    """
    leaves, structure = jax.tree.flatten(nest, is_leaf=_leaf_test(handed))
    if has_none(leaves):
        return leaves, structure
    return jax.tree.flatten(_opened(nest, handed, everything), is_leaf=_leaf_test(handed))


def flatten_with_paths(
    nest: Nest, *, handed: bool = False, everything: bool = False
) -> tuple[list[tuple[str, Any]], Any]:
    """Return the leaves, each with its place in the nest, such as `['loss']`."""
    found, structure = jax.tree_util.tree_flatten_with_path(
        _opened(nest, handed, everything), is_leaf=_leaf_test(handed)
    )
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in found], structure


def flatten_with_keys(nest: Nest) -> tuple[list[tuple[Any, Any]], Any]:
    """Return the leaves, of every container, each with the keys that lead to it as JAX has them."""
    return jax.tree_util.tree_flatten_with_path(
        _opened(nest, handed=False, everything=True), is_leaf=_leaf_test(handed=False)
    )


def leaves(nest: Nest, *, handed: bool = False) -> list[Any]:
    return flatten(nest, handed=handed)[0]


def transform(
    function: Callable[..., Any],
    nest: Nest,
    *others: Nest,
    handed: bool = False,
    everything: bool = False,
) -> Nest:
    nests = [_opened(each, handed, everything) for each in (nest, *others)]
    return jax.tree.map(function, *nests, is_leaf=_leaf_test(handed))


def is_leaf(value: Any) -> bool:
    if _is_whole(value):
        return True
    container = is_container(value, data_only=True, is_leaf=_is_whole)
    return jax.tree_util.all_leaves([value]) and not container


def _leaf_test(handed: bool) -> Callable[[Any], bool]:
    return _is_one if handed else _is_whole


def _opened(nest: Nest, handed: bool, everything: bool) -> Nest:
    return opened(nest, data_only=not everything, is_leaf=_leaf_test(handed))
