"""The extra arguments of a transformation, beyond gradients, state and params."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import jax

from replicax import _nest
from replicax._typing import Leaf, Nest
from replicax.values import DistributedValues
from replicax.variables import Variable

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef


_OF_THE_LOSS = ("value", "grad")  # these differ between replicas, as gradients do
_NOT_NUMBERS = (str, bytes)


@final
@dataclass(frozen=True, slots=True)
class Extra:
    """Extra arguments, taken apart for a meeting of the replicas.

    Args:
      structure: The structure from which to put them together again.
      kinds: For each leaf, whether it belongs to the loss (True), is shared by all replicas
        (False), or is not a number (None).
      of_the_loss: The leaves to be reduced over the replicas.
      shared: The leaves that are the same on all of them.
      others: The leaves that are not numbers, such as functions.
    """

    structure: PyTreeDef
    kinds: tuple[bool | None, ...]
    of_the_loss: list[Leaf]
    shared: list[Leaf]
    others: list[Leaf]

    @classmethod
    def of(cls, extra: dict[str, Nest]) -> Extra:
        kinds: list[bool | None] = []
        groups: dict[bool | None, list[object]] = {True: [], False: [], None: []}
        for name in sorted(extra):
            for leaf in _nest.leaves(extra[name]):
                kind = (name in _OF_THE_LOSS) if _is_numeric(leaf) else None
                kinds.append(kind)
                groups[kind].append(leaf)
        structure = _nest.flatten(extra)[1]
        return cls(structure, tuple(kinds), groups[True], groups[False], groups[None])

    def joined(self, of_the_loss: Sequence[object], shared: Sequence[object]) -> dict[str, Nest]:
        """Return the arguments with these values in place of the leaves."""
        remaining = {True: iter(of_the_loss), False: iter(shared), None: iter(self.others)}
        return jax.tree.unflatten(self.structure, [next(remaining[kind]) for kind in self.kinds])

    @staticmethod
    def has_functions(extra: dict[str, Nest]) -> bool:
        return not all(_is_numeric(leaf) for leaf in _nest.leaves(extra))

    @staticmethod
    def placed(extra: dict[str, Nest], place: Callable[[Leaf], object]) -> dict[str, Nest]:
        """Return the arguments with every number moved by `place`."""
        return _nest.transform(lambda leaf: place(leaf) if _is_numeric(leaf) else leaf, extra)


def _is_numeric(leaf: object) -> bool:
    if isinstance(leaf, (Variable, DistributedValues)):
        return True
    return not callable(leaf) and not isinstance(leaf, _NOT_NUMBERS)
