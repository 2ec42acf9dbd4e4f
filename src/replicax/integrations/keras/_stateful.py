"""Steps of a model that change its variables in place, as with TensorFlow's backend."""

from __future__ import annotations

from typing import final

import jax
import keras
import numpy as np

from replicax import _bridges, _context
from replicax._typing import Nest
from replicax.execution import Function
from replicax.integrations.keras._private import get_array, set_array
from replicax.integrations.keras._rows import cut, is_rows, rows_of
from replicax.integrations.keras._scope import owned_by
from replicax.integrations.keras._steps import Everywhere, State
from replicax.strategies import Strategy

_GROUPS = {
    "train_step": ("trainable", "non_trainable", "optimizer", "metrics"),
    "test_step": ("trainable", "non_trainable", "metrics"),
    "predict_step": ("trainable", "non_trainable"),
}


@final
class Stateful:
    """`step(self, data)` as one program, in which all variables that it touches are found.

    They may include some that Keras does not know, such as the slots of a second optimizer. The
    step runs outside of the strategy, as it computes what one device would on the whole batch.
    """

    def __init__(
        self, model: keras.Model, strategy: Strategy, name: str, *, compiled: bool
    ) -> None:
        self._model, self._strategy = model, strategy
        self._groups = _GROUPS[name]
        method = getattr(model, name)

        def step(data: Nest) -> Nest:
            with owned_by(strategy):
                return method(jax.tree.map(_cut, data, is_leaf=is_rows))

        step.__name__ = name
        self._step = step
        self._function = Function(step) if compiled else None
        self._everywhere = Everywhere(strategy.topology)

    def __call__(self, state: State, data: Nest) -> tuple[Nest, State]:
        self._put_back(state)
        with _context.entered(_context.outside_of_scopes()):
            if self._function is None:
                outputs = _bridges.surrounded(self._step)(self._on_host(data))
            else:
                outputs = self._function(self._rows(data))
        # Read again, because the first step may have created variables.
        return outputs, tuple([get_array(v) for v in group] for group in self._variables())

    def trace(self, state: State, data: Nest) -> jax.stages.Traced:
        """Return the program for a batch without running it."""
        assert self._function is not None
        self._put_back(state)
        with _context.entered(_context.outside_of_scopes()):
            return self._function.trace(self._rows(data))

    def _on_host(self, data: Nest) -> Nest:
        """Return a whole batch for the first device, where variables are read outside of scopes."""
        return jax.tree.map(np.asarray, self._everywhere(data))

    def _rows(self, data: Nest) -> Nest:
        topology = self._strategy.topology
        return jax.tree.map(lambda leaf: rows_of(leaf, topology), data, is_leaf=is_rows)

    def _put_back(self, state: State) -> None:
        """Restore the variables' arrays, which Keras removes during `fit`."""
        for variables, arrays in zip(self._variables(), state, strict=True):
            for variable, array in zip(variables, arrays, strict=True):
                set_array(variable, array)

    def _variables(self) -> list[list[keras.Variable]]:
        model = self._model
        groups = {
            "trainable": lambda: model.trainable_variables,
            "non_trainable": lambda: model.non_trainable_variables,
            "optimizer": lambda: model.optimizer.variables,
            "metrics": lambda: model.metrics_variables,
        }
        return [groups[name]() for name in self._groups]


def _cut(leaf: Nest) -> Nest:
    return cut(leaf.array, leaf.counts) if is_rows(leaf) else leaf
