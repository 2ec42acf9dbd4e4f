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
from replicax._typing import Leaf, Nest
from replicax.errors import InconsistentTracing
from replicax.execution._cache_key import are_uneven, describe, dressed
from replicax.execution._function_cache import contents_of
from replicax.input import DistributedIterator
from replicax.values import PerReplica

Program = TypeVar("Program")


class NotOneProgram(BaseException):
    """A signal that replicas do different things, so the function is run eagerly, not traced.

    It is not an `Exception`, so that the user's handlers do not catch it.
    """


class AtItsEnd(NotOneProgram):
    """The signal that an iterator is at its end or has failed; other calls may be one program."""


class TakesElementsInLoop(NotOneProgram):
    """The signal of a loop over elements: it runs as Python, and its body is compiled."""


@final
class Element:
    """An element of an iterator: its arrays, and how to rebuild it from them.

    A program cannot take one that has strings, or arrays of different ranks. Such an element has no
    `arrays`, but it does have a key. An element is `uneven` if shapes differ between replicas.
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
        # The arrays are left out: a program is long-lived, and must not keep a batch alive.
        static = [leaf if fill is None else None for leaf, fill in zip(leaves, fills, strict=True)]

        def rebuild(arrays: Sequence[object]) -> Nest:
            return jax.tree.unflatten(structure, dressed(static, fills, arrays))

        self.rebuild: Callable[[Sequence[Any]], Nest] = rebuild


def _shapes(leaf: Leaf) -> Leaf:
    parts = leaf.samples() if isinstance(leaf, PerReplica) else (leaf,)
    return tuple((np.shape(part), str(getattr(part, "dtype", type(part)))) for part in parts)


@final
class TakenElements:
    """The elements that a traced function takes, in order: found in one pass, used in the next.

    In the first pass the elements are only inspected, not taken from their iterators. Those whose
    shapes differ between replicas can be declined.
    """

    def __init__(self, *, takes_uneven: bool = True) -> None:
        self._takes_uneven = takes_uneven
        self.iterators: list[DistributedIterator] = []
        self.elements: list[Element] = []

    def find(self, iterator: DistributedIterator) -> tuple[Element, list[Any]]:
        """Return the next element, and its arrays."""
        position = self.iterators.count(iterator)
        ahead = iterator._peek(position + 1)
        if len(ahead) <= position:
            raise AtItsEnd
        element = Element(ahead[position])
        self.iterators.append(iterator)
        self.elements.append(element)
        if element.arrays is None or (element.uneven and not self._takes_uneven):
            raise NotOneProgram
        return element, element.arrays

    def restart(self) -> None:
        """Discard the findings: the first pass begins again."""
        self.iterators.clear()
        self.elements.clear()

    def again(self, iterator: DistributedIterator, number: int) -> Element:
        """Return the element that was found at position `number`."""
        if number >= len(self.iterators) or self.iterators[number] is not iterator:
            raise InconsistentTracing(
                "The function did not take the same elements of its iterators when it was traced "
                "again. A function must do the same whenever it is traced; look for Python state "
                "that it changes."
            )
        return self.elements[number]

    @property
    def kinds(self) -> tuple[Any, ...]:
        return tuple(element.key for element in self.elements)


_Finder = Callable[
    [Sequence[Any]], Any
]  # finds an iterator in the leaves of the arguments, or elsewhere


@final
class ProgramsByElements(Generic[Program]):
    """The ways to execute calls of a function that takes elements.

    There is one for each kind of elements seen so far: their shapes decide what is computed, and
    may decide which elements are taken.
    """

    def __init__(self) -> None:
        self._ways: list[tuple[list[_Finder], tuple[object, ...], Program]] = []

    @property
    def ways(self) -> list[Program]:
        return [way for _, _, way in self._ways]

    def add(
        self,
        taken: TakenElements,
        python_function: Callable[..., object],
        leaves: Sequence[object],
        way: Program,
    ) -> None:
        """Add a `way` for calls with elements such as those of `taken`."""
        finders = [_finder_of(iterator, python_function, leaves) for iterator in taken.iterators]
        self._ways.append((finders, taken.kinds, way))

    def way(self, leaves: Sequence[object]) -> tuple[Program, list[Any], list[Element]] | None:
        """Return a call's program, iterators and their next elements, or None if it is unknown."""
        for finders, kinds, way in self._ways:
            iterators = [find(leaves) for find in finders]
            if not all(isinstance(iterator, DistributedIterator) for iterator in iterators):
                continue
            elements = _next_of_each(iterators)
            if elements is not None and tuple(element.key for element in elements) == kinds:
                return way, iterators, elements
        return None


def _next_of_each(iterators: Sequence[DistributedIterator]) -> list[Element] | None:
    """Return the next element of each iterator, in order, or None if there are too few."""
    ahead = {
        iterator: iter(iterator._peek(count)) for iterator, count in Counter(iterators).items()
    }
    try:
        return [Element(next(ahead[iterator])) for iterator in iterators]
    except StopIteration:
        return None


def _finder_of(
    iterator: DistributedIterator, python_function: Callable[..., object], leaves: Sequence[object]
) -> _Finder:
    """Return a function that finds the iterator, or its replacement, in later calls."""
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
    reference = weakref.ref(iterator)  # programs must not keep iterators alive
    return lambda _: reference()
