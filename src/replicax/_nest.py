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


def _is_whole(node: Any) -> bool:
    return isinstance(node, Whole)


def flatten(nest: Nest) -> tuple[list[Any], Any]:
    return jax.tree.flatten(nest, is_leaf=_is_whole)


def leaves(nest: Nest) -> list[Any]:
    return jax.tree.leaves(nest, is_leaf=_is_whole)


def transform(function: Callable[..., Any], nest: Nest, *others: Nest) -> Nest:
    return jax.tree.map(function, nest, *others, is_leaf=_is_whole)


def is_leaf(value: Any) -> bool:
    return _is_whole(value) or jax.tree_util.all_leaves([value])
