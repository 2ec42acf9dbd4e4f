"""Changes of arrays on servers, as they travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import numpy as np

WriteName: TypeAlias = Literal["assign", "assign_add", "assign_sub"]


@final
@dataclass(frozen=True, slots=True)
class WriteTo:
    """A write to an array.

    Args:
      array: The number of the array.
      write: What is done.
      value: The operand.
      rows: The rows to which its rows are added; None for all of the array, in order. A row that
        occurs twice gets both.
    """

    array: int
    write: WriteName
    value: np.ndarray
    rows: np.ndarray | None = None


@final
@dataclass(frozen=True, slots=True)
class UpdateOf:
    """New values of arrays, which the server computes from their values when it applies them.

    Args:
      program: The number of the program, from values and operands to new values.
      arrays: The numbers of the arrays whose values it needs.
      operands: The operands.
      changed: The numbers of the arrays that get its results.
    """

    program: int
    arrays: list[int]
    operands: list[np.ndarray]
    changed: list[int]


Change: TypeAlias = WriteTo | UpdateOf
