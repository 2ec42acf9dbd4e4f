"""Fingerprints of NNX objects: the properties that a compiled program depends on.

`model.eval()` changes only an attribute, and must be noticed; so must a replaced layer. Every call
of a compiled function pays for the check: 0.3 ms for 30 modules with 120 variables.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from flax import nnx

from replicax._bridges import Memory
from replicax._typing import Leaf
from replicax.integrations.flax._discovery import Reach, items_of, may_lead_somewhere
from replicax.integrations.flax._private import NOT_THE_USERS

_BY_VALUE = frozenset({bool, int, float, complex, str, bytes, type(None)})
_KEPT = 64  # sets of roots per function whose reachable objects are cached


def fingerprint(fn: Callable[..., object], leaves: Sequence[object], memory: Memory) -> Fingerprint:
    """Return the fingerprint of the objects that `fn` or the leaves of its arguments can reach."""
    roots = [fn, *(leaf for leaf in leaves if may_lead_somewhere(leaf))]
    key = tuple([id(root) for root in roots])
    known = memory.get(key)
    if known is None or not known.holds():
        if len(memory) >= _KEPT:
            memory.clear()
        known = memory[key] = _Known(roots)
    return known.fingerprint


@final
class _Known:
    """A cache entry: the objects that can be reached from some roots."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self._reach = Reach(roots)
        # Roots are kept alive so that their ids stay valid; those without modules may be deleted.
        self._roots = [_weakly(root) if self._reach.is_empty else root for root in roots]
        self.fingerprint = Fingerprint(self._reach)
        self._seen = self._look()
        self._kinds = _kinds(self._reach)

    def holds(self) -> bool:
        if any(isinstance(root, weakref.ref) and root() is None for root in self._roots):
            return False
        return self._look() == self._seen and _kinds(self._reach) == self._kinds

    def _look(self) -> list[Any]:
        reach = self._reach
        looked = [
            value if value.__class__ in _BY_VALUE else (id(value),)
            for held in (*map(vars, reach.nodes), *reach.containers.values())
            for value in (held.values() if held.__class__ is dict else held)
        ]
        # Values such as counters change at every step and lead to no modules, so they are left out.
        looked += [
            id(value) for place in reach.places for value in place() if may_lead_somewhere(value)
        ]
        return looked


def _weakly(root: object) -> object:
    try:
        return weakref.ref(root)
    except TypeError:
        return root  # e.g. a list


@final
class Fingerprint:
    """The identity of objects, their attributes, and the shapes and types of their variables."""

    __slots__ = ("_hash", "_held", "_key")

    def __init__(self, reach: Reach) -> None:
        variables = [reached.variable for reached in reach.variables]
        attributes = _held(reach)
        self._held = (reach.nodes, variables, attributes)  # so that their ids stay valid
        self._key = (
            [id(thing) for thing in (*reach.nodes, *variables)],
            # NNX replaces lists with equal ones, so lists are compared by their items.
            [_identity(value, reach.containers) for value in attributes],
            _kinds(reach),
        )
        self._hash = hash(tuple(self._key[0]))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint):
            return False
        return self is other or self._key == other._key

    def __repr__(self) -> str:
        return f"<{len(self._held[0])} objects of Flax>"


def _held(reach: Reach) -> list[object]:
    """Return all attributes except NNX's own, and the items of containers."""
    values = [
        value
        for node in reach.nodes
        for name, value in sorted(vars(node).items())  # NNX changes their order
        if name not in NOT_THE_USERS
    ]
    for container in reach.containers.values():
        values += items_of(container)
    return values


def _identity(value: Any, containers: dict[int, Any]) -> object:
    if value.__class__ in _BY_VALUE:
        return value
    if isinstance(value, nnx.State) or id(value) in containers:
        return (
            value.__class__,
            len(value),
            tuple(sorted(value, key=str)) if isinstance(value, dict) else None,
        )
    return (id(value),)


def _kinds(reach: Reach) -> list[Any]:
    kinds: list[Any] = []
    for reached in reach.variables:
        value = reached.variable.get_raw_value()
        dtype = getattr(value, "dtype", None)
        if dtype is not None:
            kinds += (value.shape, dtype)
        else:
            leaves, structure = jax.tree.flatten(value)
            kinds += (structure, *(_kind(leaf) for leaf in leaves))
    return kinds


def _kind(leaf: Leaf) -> Leaf:
    if hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex)):
        return jnp.shape(leaf), jnp.result_type(leaf)
    return leaf if leaf.__class__ in _BY_VALUE else (id(leaf),)
