"""The program of the smallest possible step. Only NumPy is imported here, for growth.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SIZE = 8  # of a variable, and of a row
CONSTANT = np.ones(SIZE, np.float32)
WEIGHT = np.eye(SIZE, dtype=np.float32)
BYTES_OF_A_ROW = CONSTANT.nbytes


@dataclass(frozen=True)
class Program:
    """Add a constant to each variable, and sum what layers make of each replica's rows."""

    variables: int = 1
    rows: int = 1  # of each replica
    layers: int = 0

    def __str__(self) -> str:
        return (
            f"variables: {self.variables:,}, rows per replica: {self.rows:,}, layers: {self.layers}"
        )

    @property
    def zeros(self) -> list[np.ndarray]:
        """The variables' first values."""
        return [np.zeros(SIZE, np.float32) for _ in range(self.variables)]

    @property
    def batch(self) -> np.ndarray:
        """The rows of a replica."""
        return np.ones((self.rows, SIZE), np.float32)
