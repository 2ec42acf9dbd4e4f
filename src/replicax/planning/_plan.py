"""What a plan says: values that do not change."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, final

from replicax.planning._collectives import Collective
from replicax.planning._estimate import Estimate
from replicax.planning._warnings import warnings_of

if TYPE_CHECKING:
    from rich.console import RenderableType


@final
@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a step needs on one device, by what they are for.

    Args:
      variables: Those of the strategy, with the state of optimizers.
      inputs: The device's share of the arguments.
      outputs: Results that are not new values of variables.
      temporaries: What is kept while the step runs.
      code: The program itself.
      capacity: What there is; None where that is not known.
    """

    variables: int
    inputs: int
    outputs: int
    temporaries: int
    code: int
    capacity: int | None

    @property
    def needed(self) -> int:
        """All together."""
        return sum(count for _, count in self.kinds())

    @property
    def fits(self) -> bool:
        """Whether there is as much."""
        return self.capacity is None or self.needed <= self.capacity

    def kinds(self) -> list[tuple[str, int]]:
        """The kinds of memory, with their bytes."""
        names = [field.name for field in fields(self) if field.name != "capacity"]
        return [(name, getattr(self, name)) for name in names]


@final
@dataclass(frozen=True, slots=True)
class PlannedVariable:
    """A variable.

    Args:
      name: What the user has called it.
      shape: All of it.
      dtype: Of its elements.
      bytes: What one device holds of it.
      whole: Whether every device holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    whole: bool


@final
@dataclass(frozen=True)
class Plan:
    """What a step needs on a topology; `print` shows it. Made by `rx.planning.plan`.

    Args:
      program: What the step function is called.
      topology: What the topology is called.
      chips: How many chips it has.
      replicas: How many replicas.
      devices_per_replica: How many devices each of these has.
      batch: How many rows a global batch has; None if no argument has rows.
      memory: What one device needs.
      flops: Floating point operations of one device in a step: matrix products and convolutions.
      bytes_accessed: Bytes that one device reads and writes in a step.
      collectives: What devices do together.
      estimate: How long that takes; None where no figures of the chip are published.
      variables: All of them, the largest first.
      seconds_to_trace: How long it took to make a program of the step.
      seconds_to_compile: How long XLA took.
    """

    program: str
    topology: str
    chips: int
    replicas: int
    devices_per_replica: int
    batch: int | None
    memory: Memory
    flops: float
    bytes_accessed: float
    collectives: tuple[Collective, ...]
    estimate: Estimate | None
    variables: tuple[PlannedVariable, ...]
    seconds_to_trace: float
    seconds_to_compile: float

    @property
    def fits(self) -> bool:
        """Whether the step can run there."""
        return self.memory.fits

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What to think about before running it."""
        return tuple(warnings_of(self))

    @property
    def rows_per_second(self) -> float | None:
        """How many rows of the batch are worked through in a second; None if not known."""
        if self.estimate is None or self.batch is None or not self.estimate.step:
            return None
        return self.batch / self.estimate.step

    def save_html(self, path: str | os.PathLike[str] = "plan.html") -> Path:
        """Writes the plan as one page that needs nothing else; returns where."""
        return Scaling((self,)).save_html(path)

    def __rich__(self) -> RenderableType:
        from replicax.planning._table import plan_table

        return plan_table(self)

    def __str__(self) -> str:
        return as_text(self.__rich__())


@final
@dataclass(frozen=True)
class Scaling:
    """Plans of one program for several topologies; `print` shows how they compare.

    Made by `rx.planning.scaling`.
    """

    plans: tuple[Plan, ...]

    def efficiency(self, plan: Plan) -> float | None:
        """Rows a second and chip, compared to the first plan; None if not known."""
        rates = [each.rows_per_second for each in (plan, self.plans[0])]
        if not all(rates):
            return None
        here, there = (rate or 0.0 for rate in rates)
        return (here / plan.chips) / (there / self.plans[0].chips)

    def save_html(self, path: str | os.PathLike[str] = "plan.html") -> Path:
        """Writes the plans as one page that needs nothing else; returns where."""
        from replicax.planning._page import page

        path = Path(path)
        path.write_text(page(self), encoding="utf-8")
        return path

    def __rich__(self) -> RenderableType:
        from replicax.planning._table import scaling_table

        return scaling_table(self)

    def __str__(self) -> str:
        return as_text(self.__rich__())


def as_text(shown: RenderableType) -> str:
    """As on a terminal of 100 columns, without colours."""
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=100, color_system=None).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def largest_first(variables: Sequence[PlannedVariable]) -> tuple[PlannedVariable, ...]:
    """Sorted by what one device holds."""
    return tuple(sorted(variables, key=lambda variable: -variable.bytes))
