"""What the first pass over a function finds: its variables, elements and strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from replicax.errors import InvalidArgument
from replicax.execution._pulling import Pulls
from replicax.execution._summed_twice import Watched
from replicax.topology import Topology
from replicax.variables import Variable

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


@dataclass
class Touched:
    """The variables that a level of a program reads, and those that it writes."""

    read: dict[Variable, None] = field(default_factory=dict)  # sets that keep the order
    written: dict[Variable, None] = field(default_factory=dict)

    @classmethod
    def union(cls, several: Sequence[Touched]) -> Touched:
        together = cls()
        for each in several:
            together.read.update(each.read)
            together.written.update(each.written)
        return together

    def all(self) -> list[Variable]:
        return list({**self.read, **self.written})

    def __bool__(self) -> bool:
        return bool(self.read or self.written)


@dataclass
class Plan:
    """What the first pass has found."""

    outer: Touched = field(default_factory=Touched)
    runs: dict[int, Touched] = field(default_factory=dict)
    pulls: Pulls = field(default_factory=Pulls)
    watched: Watched = field(default_factory=Watched)
    topology: Topology | None = None
    noted: Topology | None = None  # over which values are combined, should nothing be run
    uneven: bool = False  # whether a run has replicas whose shapes differ
    thorough: bool = False  # whether the first pass takes derivatives too
    skipped: bool = False  # whether it has skipped one

    @property
    def complete(self) -> bool:
        """Whether the first pass has traced the program itself, which uses no variables."""
        return not (self.outer or self.pulls.elements)

    def found(self) -> tuple[Any, ...]:
        """Return what tells whether another first pass has found the same."""
        levels = [self.outer, *(self.runs[number] for number in sorted(self.runs))]
        by_id = [[list(map(id, touched)) for touched in (e.read, e.written)] for e in levels]
        return len(self.pulls.elements), by_id

    def use(self, strategy: StrategyLike) -> None:
        if self.topology is None:
            self.topology = strategy.topology
        elif self.topology != strategy.topology:
            raise InvalidArgument(
                f"One `rx.function` runs on {self.topology} and, by {strategy!r}, on "
                f"{strategy.topology}. Use one strategy in a function."
            )
