"""The messages between the coordinator and a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

from replicax._typing import Nest
from replicax.execution import Stage
from replicax.variables import Piece, Write


@final
@dataclass(frozen=True, slots=True)
class Table:
    """A variable of which rows are looked up, or changed."""

    name: str
    num_rows: int
    pieces: list[Piece]


@final
@dataclass(frozen=True, slots=True)
class WriteBy:
    """A write whose operand a program computes; with `to_rows`, an addition to rows."""

    variable: Table
    write: Write
    to_rows: bool


@final
@dataclass(frozen=True, slots=True)
class UpdateBy:
    """An update whose operands a program computes; see `UpdateOf`."""

    server: int
    program: int
    arrays: list[int]
    num_operands: int
    changed: list[int]


@final
@dataclass(frozen=True, slots=True)
class WorkerProgram:
    """A closure's program, as a worker needs it; see `TracedClosure`, from which it is made.

    `reads` has the parts of the variables whose values it needs, by the indices of the inputs.
    """

    main: Stage
    rows: Stage | None
    reads: dict[int, list[Piece]]
    num_variables: int
    num_arrays: int
    taken: list[tuple[int, int] | Table]
    element_kinds: list[Any]
    changes: list[WriteBy | UpdateBy]
    count: int


@final
@dataclass(frozen=True, slots=True)
class Call:
    """A closure to be run.

    Args:
      number: The number of the closure.
      settled: All closures with smaller numbers are done.
      program: The number of its program.
      arrays: The arrays of its arguments that the program needs, by their indices.
      iterators: The numbers of the iterators in its arguments.
      programs: Programs that the worker does not have yet.
      datasets: Datasets, or functions that return one, of iterators that it does not have yet.
      forgotten: Iterators that it need not keep.
    """

    number: int
    settled: int
    program: int
    arrays: dict[int, Any]
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
