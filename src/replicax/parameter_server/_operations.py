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
    """

    array: int
    write: WriteName
    value: np.ndarray
