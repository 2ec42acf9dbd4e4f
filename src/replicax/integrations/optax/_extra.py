"""What a transformation is given besides gradients, state and params."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax

from replicax import _nest
from replicax.values import DistributedValues
from replicax.variables import Variable

_OF_THE_LOSS = ("value", "grad")  # which differ between replicas, as gradients do
_NOT_NUMBERS = (str, bytes)


@final
@dataclass(frozen=True, slots=True)
class Extra:
    """Extra arguments, taken apart for a meeting of the replicas.

    Args:
      structure: How they are put together again.
      kinds: For each leaf, whether it is of the loss (True), shared by all replicas (False), or no
        number (None).
      of_the_loss: The leaves to be reduced over the replicas.
      shared: Those that are the same on all of them.
      others: Those that are no numbers, such as functions.
    """

    structure: Any
    kinds: tuple[bool | None, ...]
    of_the_loss: list[Any]
    shared: list[Any]
    others: list[Any]

    @classmethod
    def of(cls, extra: dict[str, Any]) -> Extra:
        kinds: list[bool | None] = []
        groups: dict[bool | None, list[Any]] = {True: [], False: [], None: []}
        for name in sorted(extra):
            for leaf in _nest.leaves(extra[name]):
                kind = (name in _OF_THE_LOSS) if _is_numeric(leaf) else None
                kinds.append(kind)
                groups[kind].append(leaf)
        structure = _nest.flatten(extra)[1]
        return cls(structure, tuple(kinds), groups[True], groups[False], groups[None])

    def joined(self, of_the_loss: Sequence[Any], shared: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments with these values in the places of theirs."""
        remaining = {True: iter(of_the_loss), False: iter(shared), None: iter(self.others)}
        return jax.tree.unflatten(self.structure, [next(remaining[kind]) for kind in self.kinds])

    @staticmethod
    def has_functions(extra: dict[str, Any]) -> bool:
        return not all(_is_numeric(leaf) for leaf in _nest.leaves(extra))

    @staticmethod
    def placed(extra: dict[str, Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the arguments with every number where the variables are."""
        return _nest.transform(lambda leaf: place(leaf) if _is_numeric(leaf) else leaf, extra)


def _is_numeric(leaf: Any) -> bool:
    if isinstance(leaf, (Variable, DistributedValues)):
        return True
    return not callable(leaf) and not isinstance(leaf, _NOT_NUMBERS)
