"""Facts about Keras' models and variables, kept outside of the objects themselves."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import keras

if TYPE_CHECKING:
    from replicax._typing import StrategyLike
    from replicax.integrations.keras._input import DistributedDataAdapter
    from replicax.strategies import Strategy
    from replicax.variables import Variable


@final
@dataclass(slots=True)
class ModelRecord:
    """Facts about one model.

    Args:
      strategy: The strategy in whose scope it was created.
      elements: The adapter of the distributed dataset that it is fitted with, if any.
      eager_by_choice: Whether it was compiled with `jit_compile=False`.
      at_the_end: The functions to call when the current `fit` ends, even with an error.
    """

    strategy: Strategy | None = None
    elements: DistributedDataAdapter | None = None
    eager_by_choice: bool = False
    at_the_end: list[Callable[[], None]] = field(default_factory=list)


@final
@dataclass(slots=True)
class VariableRecord:
    """The strategy in whose scope a variable was created, and our variable that stands for it."""

    owner: StrategyLike | None = None
    adopted: Variable | None = None


@final
class Records:
    """The records of all models and variables, each kept until its object is deleted."""

    def __init__(self) -> None:
        self._models: weakref.WeakKeyDictionary[keras.Model, ModelRecord]
        self._models = weakref.WeakKeyDictionary()
        # Keras variables compare by value, so the keys are ids.
        self._variables: dict[int, VariableRecord] = {}
        self.thread = threading.local()  # Keras' distribution before ours, set per thread

    def known(self, model: keras.Model) -> ModelRecord | None:
        """Return the record of a model, if there is one."""
        return self._models.get(model)

    def model(self, model: keras.Model) -> ModelRecord:
        """Return the record of a model."""
        record = self._models.get(model)
        if record is None:
            record = self._models[model] = ModelRecord()
        return record

    def variable(self, variable: keras.Variable) -> VariableRecord:
        """Return the record of a variable."""
        record = self._variables.get(id(variable))
        if record is None:
            record = self._variables[id(variable)] = VariableRecord()
            weakref.finalize(variable, self._variables.pop, id(variable), None)
        return record


records = Records()
