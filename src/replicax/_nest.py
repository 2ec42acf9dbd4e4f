"""Nests as replicax sees them: pytrees in which a variable is one leaf.

To JAX, a variable is its value, so that it can be given to any `jax.numpy` function or to a jitted
one; taking a nest apart with `jax.tree` would lose the variable. These functions keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

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


def is_handed_whole(value: Any) -> bool:
    return isinstance(value, _handed_whole)


def _is_whole(node: Any) -> bool:
    return isinstance(node, Whole)


def _is_one(node: Any) -> bool:
    return isinstance(node, (Whole, _handed_whole))


def flatten(nest: Nest, *, handed: bool = False) -> tuple[list[Any], Any]:
    """The leaves; of what is `handed` to a function, or back, objects stay what they are."""
    return jax.tree.flatten(nest, is_leaf=_is_one if handed else _is_whole)


def flatten_with_paths(nest: Nest, *, handed: bool = False) -> tuple[list[tuple[str, Any]], Any]:
    """Return the leaves, each with its place in the nest, such as `['loss']`."""
    found, structure = jax.tree_util.tree_flatten_with_path(
        nest, is_leaf=_is_one if handed else _is_whole
    )
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in found], structure


def leaves(nest: Nest, *, handed: bool = False) -> list[Any]:
    return jax.tree.leaves(nest, is_leaf=_is_one if handed else _is_whole)


def transform(
    function: Callable[..., Any], nest: Nest, *others: Nest, handed: bool = False
) -> Nest:
    return jax.tree.map(function, nest, *others, is_leaf=_is_one if handed else _is_whole)


def is_leaf(value: Any) -> bool:
    return _is_whole(value) or jax.tree_util.all_leaves([value])
