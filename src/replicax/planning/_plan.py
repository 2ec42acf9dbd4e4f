"""The contents of a plan, as immutable values."""

from __future__ import annotations

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
    """The bytes that a step needs on one device, by purpose.

    Args:
      variables: The strategy's variables, including the state of optimizers.
      inputs: The device's share of the arguments.
      outputs: Results that are not new values of variables.
      temporaries: Intermediate values, kept while the step runs.
      code: The program itself.
      capacity: The bytes that are available, or None if that is not known.
    """

    variables: int
    inputs: int
    outputs: int
    temporaries: int
    code: int
    capacity: int | None

    @property
    def needed(self) -> int:
        """The total."""
        return sum(count for _, count in self.kinds())

    @property
    def fits(self) -> bool:
        """True if there is enough memory."""
        return self.capacity is None or self.needed <= self.capacity

    def kinds(self) -> list[tuple[str, int]]:
        """Return the kinds of memory, with their bytes."""
        names = [field.name for field in fields(self) if field.name != "capacity"]
        return [(name, getattr(self, name)) for name in names]


@final
@dataclass(frozen=True, slots=True)
class PlannedVariable:
    """A variable of a planned step.

    Args:
      name: The name that the user gave it.
      shape: The shape of the whole variable.
      dtype: The dtype of its elements.
      bytes: The bytes that one device holds of it.
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
    """The needs of a step on a topology, made by `rx.planning.plan`; `print` shows them.

    Args:
      program: The name of the step function.
      topology: The name of the topology.
      chips: The number of its chips.
      replicas: The number of replicas.
      devices_per_replica: The number of devices of each replica.
      batch: The number of rows of a global batch, or None if no argument has rows.
      memory: The memory that one device needs.
      flops: Floating point operations of one device in a step: matrix products and convolutions.
      bytes_accessed: Bytes that one device reads and writes in a step.
      collectives: The collectives of a step.
      estimate: How long a step takes, or None if no figures of the chip are published.
      variables: All variables, largest first.
      seconds_to_trace: How long it took to trace the step.
      seconds_to_compile: How long XLA took to compile it.
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
        """True if the step fits into the memory of the devices."""
        return self.memory.fits

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """The points to consider before running the step."""
        return tuple(warnings_of(self))

    @property
    def rows_per_second(self) -> float | None:
        """The number of rows processed per second, or None if not known."""
        if self.estimate is None or self.batch is None or not self.estimate.step:
            return None
        return self.batch / self.estimate.step

    def save_html(self, path: str | os.PathLike[str] = "plan.html") -> Path:
        """Write the plan as one self-contained page; return its path."""
        return Scaling((self,)).save_html(path)

    def __rich__(self) -> RenderableType:
        from replicax.planning._table import plan_table

        return plan_table(self)

    def __str__(self) -> str:
        from replicax._tables import as_text

        return as_text(self.__rich__())


@final
@dataclass(frozen=True)
class Scaling:
    """Plans of one program for several topologies; `print` shows how they compare.

    It is made by `rx.planning.scaling`.
    """

    plans: tuple[Plan, ...]

    def efficiency(self, plan: Plan) -> float | None:
        """Return rows per second per chip relative to the first plan, or None if not known."""
        rates = [each.rows_per_second for each in (plan, self.plans[0])]
        if not all(rates):
            return None
        here, there = (rate or 0.0 for rate in rates)
        return (here / plan.chips) / (there / self.plans[0].chips)

    def save_html(self, path: str | os.PathLike[str] = "plan.html") -> Path:
        """Write the plans as one self-contained page; return its path."""
        from replicax.planning._page import page

        path = Path(path)
        path.write_text(page(self), encoding="utf-8")
        return path

    def __rich__(self) -> RenderableType:
        from replicax.planning._table import scaling_table

        return scaling_table(self)

    def __str__(self) -> str:
        from replicax._tables import as_text

        return as_text(self.__rich__())


def largest_first(variables: Sequence[PlannedVariable]) -> tuple[PlannedVariable, ...]:
    """Sort variables by their bytes on one device."""
    return tuple(sorted(variables, key=lambda variable: -variable.bytes))
