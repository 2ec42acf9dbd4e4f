"""`next(iterator)` in a compiled function: elements that a program takes when it is called."""

from __future__ import annotations

import types
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, final

import jax
import numpy as np

from replicax import _nest
from replicax._typing import Nest
from replicax.errors import InconsistentTracing
from replicax.execution._compiled_runs import contents_of
from replicax.execution._signature import are_uneven, describe, dressed
from replicax.input import DistributedIterator
from replicax.values import PerReplica

Program = TypeVar("Program")


class NotOneProgram(BaseException):
    """Raised while tracing something that replicas do differently; it is run eagerly instead.

    No `Exception`, so that the user's handlers let it pass.
    """


class AtItsEnd(NotOneProgram):
    """An iterator has no more elements, or an error; other calls may be one program."""


class TakesElementsInLoop(NotOneProgram):
    """The function loops over elements: it runs as Python, and what it runs is compiled."""


@final
class Element:
    """An element of an iterator: its arrays, and how to put it together of them again.

    A program cannot take one that has strings, or arrays of different ranks. Such an element has no
    `arrays`, but a key all the same. It is `uneven` if its replicas differ in shape.
    """

    __slots__ = ("arrays", "key", "rebuild", "uneven")

    def __init__(self, element: Nest) -> None:
        leaves, structure = _nest.flatten(element)
        described = describe(leaves, None)
        self.arrays: list[Any] | None = None
        self.uneven = described is not None and are_uneven(described[0])
        if described is None:
            self.key: Any = (structure, tuple(_shapes(leaf) for leaf in leaves))
            return
        keys, self.arrays, fills = described
        self.key = (structure, tuple(keys))
        # Without the arrays: a program is kept for long, and must not keep a batch alive.
        static = [leaf if fill is None else None for leaf, fill in zip(leaves, fills, strict=True)]

        def rebuild(arrays: Sequence[Any]) -> Nest:
            return jax.tree.unflatten(structure, dressed(static, fills, arrays))

        self.rebuild: Callable[[Sequence[Any]], Nest] = rebuild


def _shapes(leaf: Any) -> Any:
    parts = leaf.samples() if isinstance(leaf, PerReplica) else (leaf,)
    return tuple((np.shape(part), str(getattr(part, "dtype", type(part)))) for part in parts)


@final
class Pulls:
    """Which elements a traced function takes, in order. Found in the first pass, used in the next.

    In the first pass the elements are looked at, and stay the next ones of their iterators. Those
    whose replicas differ in shape can be declined.
    """

    def __init__(self, *, takes_uneven: bool = True) -> None:
        self._takes_uneven = takes_uneven
        self.iterators: list[DistributedIterator] = []
        self.elements: list[Element] = []

    def find(self, iterator: DistributedIterator) -> tuple[Element, list[Any]]:
        """The next element, and its arrays."""
        position = self.iterators.count(iterator)
        ahead = iterator.peek(position + 1)
        if len(ahead) <= position:
            raise AtItsEnd
        element = Element(ahead[position])
        self.iterators.append(iterator)
        self.elements.append(element)
        if element.arrays is None or (element.uneven and not self._takes_uneven):
            raise NotOneProgram
        return element, element.arrays

    def restart(self) -> None:
        """Forget what was found: the first pass begins again."""
        self.iterators.clear()
        self.elements.clear()

    def again(self, iterator: DistributedIterator, number: int) -> Element:
        """The element that was found as that number."""
        if number >= len(self.iterators) or self.iterators[number] is not iterator:
            raise InconsistentTracing(
                "The function did not take the same elements of its iterators when it was traced "
                "again. A function has to do the same whenever it is traced; look for Python state "
                "that it changes."
            )
        return self.elements[number]

    @property
    def kinds(self) -> tuple[Any, ...]:
        return tuple(element.key for element in self.elements)


Place = Callable[[Sequence[Any]], Any]  # finds an iterator in the leaves of the arguments, or else


@final
class Pulling(Generic[Program]):
    """What to do with calls of a function that takes elements.

    That depends on their shapes, and so may which are taken: there is a way for each kind of those
    that were seen.
    """

    def __init__(self) -> None:
        self._ways: list[tuple[list[Place], tuple[Any, ...], Program]] = []

    @property
    def ways(self) -> list[Program]:
        return [way for _, _, way in self._ways]

    def add(
        self, pulls: Pulls, python_function: Callable[..., Any], leaves: Sequence[Any], way: Program
    ) -> None:
        """A `way` for calls with elements such as those of `pulls`."""
        places = [_place_of(iterator, python_function, leaves) for iterator in pulls.iterators]
        self._ways.append((places, pulls.kinds, way))

    def way(self, leaves: Sequence[Any]) -> tuple[Program, list[Any], list[Element]] | None:
        """That of a call, the iterators, and their next elements; None if there is none yet."""
        for places, kinds, way in self._ways:
            iterators = [place(leaves) for place in places]
            if not all(isinstance(iterator, DistributedIterator) for iterator in iterators):
                continue
            elements = _next_of_each(iterators)
            if elements is not None and tuple(element.key for element in elements) == kinds:
                return way, iterators, elements
        return None


def _next_of_each(iterators: Sequence[DistributedIterator]) -> list[Element] | None:
    """The next element of each, in order; None if there are not so many."""
    ahead = {iterator: iter(iterator.peek(count)) for iterator, count in Counter(iterators).items()}
    try:
        return [Element(next(ahead[iterator])) for iterator in iterators]
    except StopIteration:
        return None


def _place_of(
    iterator: DistributedIterator, python_function: Callable[..., Any], leaves: Sequence[Any]
) -> Place:
    """Where later calls find the iterator, which may be another one by then."""
    for index, leaf in enumerate(leaves):
        if leaf is iterator:
            return lambda leaves: leaves[index]
    if isinstance(python_function, types.FunctionType):
        names = python_function.__globals__
        for cell in python_function.__closure__ or ():
            if contents_of(cell) is iterator:
                return lambda _: contents_of(cell)
        for name in python_function.__code__.co_names:
            if names.get(name) is iterator:
                return lambda _: names.get(name)
    reference = weakref.ref(iterator)  # programs keep no iterator alive
    return lambda _: reference()
