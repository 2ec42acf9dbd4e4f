"""`next(iterator)` in a compiled function: elements that a program takes when it is called."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from replicax import _nest
from replicax._typing import Nest
from replicax.errors import InconsistentTracing
from replicax.execution._signature import describe
from replicax.input import DistributedIterator


class NotOneProgram(BaseException):
    """Raised while tracing something that replicas do differently; it is run eagerly instead.

    No `Exception`, so that the user's handlers let it pass.
    """


class NotThisTime(NotOneProgram):
    """The iterator is at its end, or has a partial batch; another call may be one program."""


class GoesThroughDataset(NotOneProgram):
    """The function has a loop over a dataset: it runs as Python, and what it runs is compiled."""


@final
class Element:
    """An element of an iterator: its arrays, and how to put it together of them again."""

    __slots__ = ("arrays", "key", "rebuild")

    def __init__(self, element: Nest) -> None:
        leaves, structure = _nest.flatten(element)
        described = describe(leaves, None)
        if described is None:
            raise NotThisTime
        keys, self.arrays, fills = described
        self.key = (structure, tuple(keys))

        def rebuild(arrays: Sequence[Any]) -> Nest:
            remaining = iter(arrays)
            return jax.tree.unflatten(
                structure,
                [
                    leaf if fill is None else fill(next(remaining))
                    for leaf, fill in zip(static, fills, strict=True)
                ],
            )

        # Without the arrays: a program is kept for long, and must not keep a batch alive.
        static = [leaf if fill is None else None for leaf, fill in zip(leaves, fills, strict=True)]
        self.rebuild: Callable[[Sequence[Any]], Nest] = rebuild


@final
class Pulls:
    """Which elements a traced function takes, in order. Found in the first pass, used in the next.

    In the first pass the elements are looked at, and stay the next ones of their iterators.
    """

    def __init__(self) -> None:
        self.iterators: list[DistributedIterator] = []
        self.elements: list[Element] = []

    def find(self, iterator: DistributedIterator) -> Element:
        position = self.iterators.count(iterator)
        ahead = iterator.peek(position + 1)
        if len(ahead) <= position:
            raise NotThisTime
        element = Element(ahead[position])
        self.iterators.append(iterator)
        self.elements.append(element)
        return element

    def again(self, iterator: DistributedIterator, number: int) -> Element:
        if number >= len(self.iterators) or self.iterators[number] is not iterator:
            raise InconsistentTracing(
                "The function did not take the same elements of its iterators when it was traced "
                "again. A function has to do the same whenever it is traced; look for Python state "
                "that it changes."
            )
        return self.elements[number]


@final
class Pulling:
    """Programs of a function that takes elements: one for each kind of them.

    Args:
      iterators: Where the elements come from, in order.
      leaves: The leaves of the arguments; iterators among these are others in each call.
    """

    def __init__(self, iterators: Sequence[DistributedIterator], leaves: Sequence[Any]) -> None:
        self.programs: dict[Any, Any] = {}
        places = {id(leaf): index for index, leaf in enumerate(leaves)}
        self._sources: list[int | weakref.ref[DistributedIterator]] = [
            places[id(iterator)] if id(iterator) in places else weakref.ref(iterator)
            for iterator in iterators
        ]

    @property
    def usable(self) -> bool:
        """Whether the iterators that the function had closed over are still there."""
        return all(isinstance(source, int) or source() is not None for source in self._sources)

    def iterators(self, leaves: Sequence[Any]) -> list[Any]:
        """Those of a call."""
        return [leaves[source] if isinstance(source, int) else source() for source in self._sources]


def look_ahead(iterators: Sequence[DistributedIterator]) -> list[Element] | None:
    """The next element of each, in order; None if they cannot be taken by a program."""
    ahead = {iterator: iter(iterator.peek(count)) for iterator, count in Counter(iterators).items()}
    try:
        return [Element(next(ahead[iterator])) for iterator in iterators]
    except (StopIteration, NotThisTime):
        return None
