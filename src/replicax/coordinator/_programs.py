"""The programs of scheduled functions: traced when a call first needs them."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from replicax import _nest
from replicax._typing import Nest, StrategyLike
from replicax.coordinator._calls import Table, UpdateBy, WorkerProgram, WriteBy
from replicax.coordinator._per_worker import PerWorkerValues
from replicax.execution import (
    ClosureCall,
    ClosureWrite,
    Function,
    TracedClosure,
    exported,
    kind_of,
)
from replicax.parameter_server import Servers
from replicax.variables import OnServers, Piece, ServerUpdate, Variable, storage_of


@final
@dataclass(frozen=True)
class Program:
    """A program of a closure.

    Args:
      number: Its number, by which workers know it.
      traced: What tracing has found; it keeps the variables alive.
      for_workers: What workers get.
      arguments: The indices of the arrays of a call that it needs.
    """

    number: int
    traced: TracedClosure
    for_workers: WorkerProgram
    arguments: list[int]


@final
@dataclass(frozen=True)
class Scheduled:
    """A call of a function, as any worker can run it.

    Args:
      name: The name of the function.
      programs: The programs for calls like this one.
      arrays: The arrays of its arguments.
      iterators: The iterators in its arguments.
    """

    name: str
    programs: Variants
    arrays: list[Any]
    iterators: list[PerWorkerValues]


@final
class Variants:
    """The programs for calls of one signature, by what the elements are like that they take."""

    def __init__(
        self,
        name: str,
        call: ClosureCall,
        platforms: Sequence[str],
        next_number: Callable[[], int],
        servers: Servers,
    ) -> None:
        self._name, self._call, self._platforms = name, call, platforms
        self._next_number, self._servers = next_number, servers
        self._known: list[Program] = []
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
        for program in self._known:
            if _is_for(program, examples):
                self._last = program
                return program
        return self.trace(lambda place, count: examples[place][:count])

    def _add(self, traced: TracedClosure) -> Program:
        for_workers = _for_workers(self._name, traced, self._servers)
        stages = (traced.main, *(() if traced.rows is None else (traced.rows,)))
        needed = {index for stage in stages for index in stage.inputs}
        first = len(traced.variables)
        arguments = [index for index in range(traced.num_arrays) if first + index in needed]
        program = Program(self._next_number(), traced, for_workers, arguments)
        self._known.append(program)
        self._last = program
        return program


def _is_for(program: Program, examples: dict[int, list[Nest]]) -> bool:
    """Tell whether elements are what a program is for."""
    places = [origin[0] for origin in program.traced.taken if isinstance(origin, tuple)]
    remaining = {place: iter(each) for place, each in examples.items()}
    try:
        kinds = [kind_of(next(remaining[place])) for place in places]
    except (KeyError, StopIteration):  # it takes others, or more of them
        return False
    return kinds == program.traced.element_kinds


@final
class Programs:
    """The programs of all functions that a coordinator has scheduled.

    Args:
      servers: The servers, which get the programs of updates.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
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
                function.__name__,
                call,
                platforms(),
                lambda: next(self._numbers),
                self._servers,
            )
            by_signature[call.signature] = found
        return found, call.arrays


def _zeros(example: Nest) -> Nest:
    """Return a nest of arrays like the examples, which take up no memory."""
    return _nest.transform(
        lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), example
    )


def _for_workers(name: str, traced: TracedClosure, servers: Servers) -> WorkerProgram:
    stages = [traced.main] if traced.rows is None else [traced.main, traced.rows]
    needed = {index for stage in stages for index in stage.inputs}
    return WorkerProgram(
        main=traced.main,
        rows=traced.rows,
        reads={
            index: list(_on_servers(variable).parts)
            for index, variable in enumerate(traced.variables)
            if index in needed
        },
        num_variables=len(traced.variables),
        num_arrays=traced.num_arrays,
        taken=[
            _table(origin, _on_servers(origin).parts) if isinstance(origin, Variable) else origin
            for origin in traced.taken
        ],
        element_kinds=traced.element_kinds,
        changes=[_change(name, change, servers) for change in traced.changes],
        count=traced.count,
    )


def _on_servers(variable: Variable) -> OnServers:
    storage = storage_of(variable)
    assert isinstance(storage, OnServers)
    return storage


def _table(variable: Variable, pieces: Sequence[Piece]) -> Table:
    return Table(variable.name, variable.shape[0] if variable.ndim else 1, list(pieces))


def _change(name: str, change: ClosureWrite | ServerUpdate, servers: Servers) -> WriteBy | UpdateBy:
    if isinstance(change, ClosureWrite):
        table = _table(change.variable, _on_servers(change.variable).pieces)
        return WriteBy(table, change.write, change.to_rows)
    x64 = bool(jax.config.read("jax_enable_x64"))
    number = servers.learn(change.server, exported(name, change.program, ["cpu"]), x64)
    return UpdateBy(change.server, number, change.arrays, len(change.operands), change.changed)
