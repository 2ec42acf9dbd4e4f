"""The findings of the first pass over a function: its variables, elements and strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from replicax.errors import InvalidArgument
from replicax.execution._iterator_elements import TakenElements
from replicax.execution._state_cells import Cell, RefCell
from replicax.execution._summed_twice import WatchedGradients
from replicax.topology import Topology
from replicax.variables import Variable

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

Cells = dict[Variable, Cell | RefCell]


@dataclass
class Touched:
    """The variables that a level of a program reads, and those that it writes.

    `nested` holds those of either kind that it uses inside JAX transformations, such as the body
    of a `lax.scan`.
    """

    read: dict[Variable, None] = field(default_factory=dict)  # sets that keep the order
    written: dict[Variable, None] = field(default_factory=dict)
    nested: dict[Variable, None] = field(default_factory=dict)

    @classmethod
    def union(cls, several: Sequence[Touched]) -> Touched:
        together = cls()
        for each in several:
            together.read.update(each.read)
            together.written.update(each.written)
            together.nested.update(each.nested)
        return together

    def all(self) -> list[Variable]:
        return list({**self.read, **self.written})

    def cells(self, variables: Iterable[Variable], states: Iterable[Any]) -> Cells:
        """Return the cells that hold the states of variables while a program is traced."""
        return {
            variable: (
                RefCell(state)
                if variable in self.nested and variable in self.written
                else Cell(state)
            )
            for variable, state in zip(variables, states, strict=True)
        }

    def __bool__(self) -> bool:
        return bool(self.read or self.written)


@dataclass
class Captures:
    """The findings of the first pass."""

    outer: Touched = field(default_factory=Touched)
    runs: dict[int, Touched] = field(default_factory=dict)
    taken: TakenElements = field(default_factory=TakenElements)
    watched: WatchedGradients = field(default_factory=WatchedGradients)
    topology: Topology | None = None
    noted: Topology | None = None  # where values are combined, if nothing is run
    uneven: bool = False  # whether a run has replicas whose shapes differ
    thorough: bool = False  # whether the first pass computes derivatives and updates too
    skipped: bool = False  # whether it has skipped any of these

    @property
    def complete(self) -> bool:
        """True if the first pass has traced the program itself, which uses no variables."""
        return not (self.outer or self.taken.elements)

    def found(self) -> tuple[Any, ...]:
        """Return a key that is equal to that of another first pass with the same findings."""
        levels = [self.outer, *(self.runs[number] for number in sorted(self.runs))]
        by_id = [[list(map(id, touched)) for touched in (e.read, e.written)] for e in levels]
        return len(self.taken.elements), by_id

    def use(self, strategy: StrategyLike) -> None:
        if self.topology is None:
            self.topology = strategy.topology
        elif self.topology != strategy.topology:
            raise InvalidArgument(
                f"One `rx.function` runs on {self.topology} and, by {strategy!r}, on "
                f"{strategy.topology}. Use one strategy in a function."
            )
