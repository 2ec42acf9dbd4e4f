"""The problem of every contestant: the same network, from the same weights, on the same rows.

Only NumPy is imported here, because each contestant runs in an environment of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

FEATURES = 784
CLASSES = 10
STEPS_A_CALL = 50  # for contestants that take several training steps per call
EPOCH_ROWS = 32_768  # for contestants that call `fit`


@dataclass(frozen=True)
class Cell:
    """One cell of the comparison: the size of the problem and the number of replicas."""

    hidden: int
    global_batch: int
    replicas: int
    learning_rate: float = 0.1

    def __post_init__(self) -> None:
        if self.global_batch % self.replicas:
            raise ValueError(
                f"A global batch of {self.global_batch} does not divide over {self.replicas} "
                "replicas. Choose a multiple, so that every contestant shares it the same way."
            )

    def __str__(self) -> str:
        layers = f"{FEATURES}-{self.hidden}-{self.hidden}-{CLASSES}"
        return f"{layers} MLP, global batch {self.global_batch}, {self.replicas} replicas"


@dataclass(frozen=True)
class ModelCell:
    """One cell of the comparison: a model, its batch and the number of replicas."""

    model: str
    global_batch: int
    replicas: int
    epoch_steps: int = 0  # for contestants that call `fit`
    learning_rate: float = 3e-4

    def __str__(self) -> str:
        return f"{self.model}, global batch {self.global_batch}, {self.replicas} replicas"


AnyCell = Cell | ModelCell


@dataclass(frozen=True)
class Batch:
    """Rows and labels, one array of each per replica."""

    rows: list[np.ndarray]
    labels: list[np.ndarray]


@dataclass(frozen=True)
class Problem(Batch):
    """The arrays of a cell."""

    weights: list[np.ndarray]
    biases: list[np.ndarray]


def problem_of(cell: Cell) -> Problem:
    random = np.random.RandomState(0)
    sizes = [FEATURES, cell.hidden, cell.hidden, CLASSES]
    share = cell.global_batch // cell.replicas
    layers = list(pairwise(sizes))
    return Problem(
        weights=[(random.randn(*layer) * 0.05).astype(np.float32) for layer in layers],
        biases=[np.zeros(size, np.float32) for size in sizes[1:]],
        rows=[random.randn(share, FEATURES).astype(np.float32) for _ in range(cell.replicas)],
        labels=[random.randint(0, CLASSES, share).astype(np.int32) for _ in range(cell.replicas)],
    )
