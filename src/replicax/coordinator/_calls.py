"""What the coordinator and a worker say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from replicax._typing import Nest
from replicax.parameter_server import WriteTo


@final
@dataclass(frozen=True, slots=True)
class Place:
    """An array on a server that is one part of a variable.

    Args:
      server: The index of the server.
      number: The number of the array there.
      rows: The rows of the variable that it has; None for all of them.
    """

    server: int
    number: int
    rows: slice | None

    def write(self, how: Any, value: np.ndarray) -> WriteTo:
        """Return the change of this part that a write of the whole value makes."""
        return WriteTo(self.number, how, value if self.rows is None else value[self.rows])


@final
@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """A closure's program, as a worker needs it; see `TracedClosure`, from which it is made."""

    exported: bytes
    reads: list[list[Place]]
    takes_index: bool
    taken: list[int]
    elements: list[int]
    element_kinds: list[Any]
    writes: list[tuple[list[Place], str]]
    count: int


@final
@dataclass(frozen=True, slots=True)
class Call:
    """A closure to be run.

    Args:
      number: The number of the closure.
      settled: All closures with smaller numbers are done.
      program: The number of its program.
      arrays: The arrays of its arguments that the program needs.
      iterators: The numbers of the iterators in its arguments.
      programs: Programs that the worker does not have yet.
      datasets: Datasets, or functions that return one, of iterators that it does not have yet.
      forgotten: Iterators that it need not keep.
    """

    number: int
    settled: int
    program: int
    arrays: list[Any]
    iterators: list[int]
    programs: dict[int, WorkerProgram] = field(default_factory=dict)
    datasets: dict[int, Any] = field(default_factory=dict)
    forgotten: list[int] = field(default_factory=list)


@final
@dataclass(frozen=True, slots=True)
class OtherElements:
    """An answer to a call: the next elements are not what its program is for.

    Args:
      examples: For each place of an iterator, nests that have the shapes and dtypes of its next
        elements.
    """

    examples: dict[int, list[Nest]]
