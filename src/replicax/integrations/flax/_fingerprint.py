"""What a compiled program depends on, of the NNX objects that its function uses.

`model.eval()` changes an attribute and nothing else, and has to be noticed; so has a layer that was
replaced. Looking is what every call of a compiled function pays for: 0.1 ms for 50 modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
from flax import nnx

from replicax.integrations.flax._discovery import Reach, may_lead_somewhere

_BY_VALUE = frozenset({bool, int, float, complex, str, bytes, type(None)})
_KEPT = 64  # sets of objects that one function is called with, of which is known what they reach


def fingerprint(
    fn: Callable[..., Any], leaves: Sequence[Any], memory: dict[Any, Any]
) -> Fingerprint:
    """That of the objects that `fn` can reach, or that are among the leaves of its arguments."""
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
    """What can be reached from some roots, and whether that is still so."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self._roots = roots  # so that their ids mean what they meant
        self._reach = Reach(roots)
        self.fingerprint = Fingerprint(self._reach)
        self._elsewhere = self._look_elsewhere()

    def holds(self) -> bool:
        return self.fingerprint.holds_for(self._reach) and self._look_elsewhere() == self._elsewhere

    def _look_elsewhere(self) -> list[int]:
        # Counters and the like change from step to step, and lead nowhere.
        return [
            id(value)
            for place in self._reach.places
            for value in place()
            if may_lead_somewhere(value)
        ]


@final
class Fingerprint:
    """The objects, their attributes, and the shapes and types of their variables."""

    __slots__ = ("_attributes", "_count", "_hash", "_held", "_kinds", "_objects")

    def __init__(self, reach: Reach) -> None:
        self._objects = tuple([id(thing) for thing in (*reach.nodes, *_variables(reach))])
        self._attributes = _attributes(reach)
        self._kinds = _kinds(reach)
        self._held = (reach.nodes, _variables(reach), _everything(reach))  # known by their ids
        self._hash = hash((self._objects, tuple(self._attributes)))
        self._count = len(reach.nodes)

    def holds_for(self, reach: Reach) -> bool:
        """Whether objects that were reached before are as they were."""
        return _attributes(reach) == self._attributes and _kinds(reach) == self._kinds

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Fingerprint)
            and self._objects == other._objects
            and self._attributes == other._attributes
            and self._kinds == other._kinds
        )

    def __repr__(self) -> str:
        return f"<{self._count} objects of Flax>"


def _variables(reach: Reach) -> list[nnx.Variable]:
    return [reached.variable for reached in reach.variables]


def _everything(reach: Reach) -> list[Any]:
    """All attributes, and what is in lists."""
    values = [value for node in reach.nodes for value in vars(node).values()]
    values.extend(item for contents in reach.containers for item in contents())
    return values


def _attributes(reach: Reach) -> list[Any]:
    return [value if value.__class__ in _BY_VALUE else (id(value),) for value in _everything(reach)]


def _kinds(reach: Reach) -> list[Any]:
    kinds: list[Any] = []
    for reached in reach.variables:
        value = reached.variable.get_raw_value()
        if isinstance(value, jax.Array):
            kinds += (value.shape, value.dtype)
        else:
            leaves, structure = jax.tree.flatten(value)
            kinds.append(structure)
            kinds += [
                (jax.numpy.shape(leaf), jax.numpy.result_type(leaf))
                if _is_number(leaf)
                else id(leaf)
                for leaf in leaves
            ]
    return kinds


def _is_number(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex))
