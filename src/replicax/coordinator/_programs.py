"""The programs of scheduled functions: traced when a call first needs them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from replicax import _nest
from replicax._typing import Nest, StrategyLike
from replicax.coordinator._calls import Place, WorkerProgram
from replicax.execution import ClosureCall, Function, TracedClosure, kind_of
from replicax.variables import OnServers, Variable, storage_of


@final
@dataclass(frozen=True)
class Program:
    """A program of a closure.

    Args:
      number: Its number, by which workers know it.
      traced: What tracing has found; it keeps the variables alive.
      for_workers: What workers get.
    """

    number: int
    traced: TracedClosure
    for_workers: WorkerProgram


@final
@dataclass(frozen=True)
class Scheduled:
    """A call of a function, as any worker can run it.

    Args:
      name: The name of the function.
      programs: The programs for calls like this one.
      arrays: The arrays of its arguments.
      iterators: The numbers of the iterators in its arguments.
      datasets: For each of them, the dataset, or a function that returns it.
    """

    name: str
    programs: Variants
    arrays: list[Any]
    iterators: list[int]
    datasets: list[Any]


@final
class Variants:
    """The programs for calls of one signature, by what the elements are like that they take."""

    def __init__(
        self,
        name: str,
        call: ClosureCall,
        platforms: Sequence[str],
        next_number: Callable[[], int],
    ) -> None:
        self._name, self._call, self._platforms = name, call, platforms
        self._next_number = next_number
        self._known: dict[Any, Program] = {}
        self._last: Program | None = None
        self._lock = threading.Lock()  # two workers may find the same new elements

    @property
    def last(self) -> Program | None:
        """The program that was asked for last."""
        return self._last

    def trace(self, peek: Callable[[int, int], list[Nest]]) -> Program:
        """Return the program for elements like the examples that `peek` returns."""
        with self._lock:
            traced = self._call.trace(
                self._name,
                lambda place, count: [_zeros(example) for example in peek(place, count)],
                self._platforms,
            )
            return self._add(traced)

    def of_elements(self, examples: dict[int, list[Nest]]) -> Program:
        """Return the program for elements like these, by the places of their iterators."""
        kinds = tuple((place, tuple(map(kind_of, each))) for place, each in examples.items())
        found = self._known.get(kinds)
        if found is None:
            found = self._known[kinds] = self.trace(lambda place, count: examples[place][:count])
        self._last = found
        return found

    def _add(self, traced: TracedClosure) -> Program:
        program = Program(self._next_number(), traced, _for_workers(traced))
        self._last = program
        return program


@final
class Programs:
    """The programs of all functions that a coordinator has scheduled."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Function, dict[Any, Variants]] = (
            weakref.WeakKeyDictionary()
        )
        self._numbers = itertools.count()

    def variants(
        self,
        strategy: StrategyLike,
        function: Function,
        args: tuple[Nest, ...],
        kwargs: dict[str, Nest],
        platforms: Callable[[], Sequence[str]],
    ) -> tuple[Variants, list[Any]]:
        """Return the programs for a call, and the arrays of its arguments."""
        call = ClosureCall.of(strategy, function, args, kwargs)
        by_signature = self._of.setdefault(function, {})
        found = by_signature.get(call.signature)
        if found is None:
            found = Variants(
                function.__name__, call, platforms(), lambda: next(self._numbers)
            )
            by_signature[call.signature] = found
        return found, call.arrays


def _zeros(example: Nest) -> Nest:
    """Return a nest of arrays like the examples, which take up no memory."""
    return _nest.transform(
        lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), example
    )


def _for_workers(traced: TracedClosure) -> WorkerProgram:
    return WorkerProgram(
        traced.exported,
        [_places(variable) for variable in traced.reads],
        traced.takes_index,
        traced.taken,
        traced.elements,
        traced.element_kinds,
        [(_places(variable), write.value) for variable, write in traced.writes],
        traced.count,
    )


def _places(variable: Variable) -> list[Place]:
    storage = storage_of(variable)
    assert isinstance(storage, OnServers)
    return [Place(piece.server, piece.number, piece.rows) for piece in storage.pieces]


