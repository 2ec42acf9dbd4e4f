"""The steps of a model's `fit`, `evaluate` and `predict`, as programs over all devices.

A program computes what one device would on the whole batch; XLA divides the work over the replicas,
because the rows of the batch are divided. The result is therefore the same as without a strategy,
even for random numbers and for layers that look across a batch, such as BatchNormalization.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import final

import jax
import jax.numpy as jnp
import keras

from replicax._typing import Nest
from replicax.integrations.keras._jit import is_compiled, refused_layers
from replicax.integrations.keras._signatures import takes_data_alone
from replicax.integrations.keras._stateful import Stateful
from replicax.integrations.keras._steps import (
    ByOperation,
    Compiled,
    IfItTraces,
    Layout,
    State,
    Step,
)
from replicax.integrations.keras._variables import adopted
from replicax.strategies import Strategy
from replicax.variables import agree_on_beginnings


def train_function(model: keras.Model, strategy: Strategy) -> StepFunction:
    return StepFunction(model, strategy, "train_step")


def test_function(model: keras.Model, strategy: Strategy) -> StepFunction:
    return StepFunction(model, strategy, "test_step")


def predict_function(model: keras.Model, strategy: Strategy) -> StepFunction:
    return StepFunction(model, strategy, "predict_step")


@final
class StepFunction:
    """The function that Keras calls for one step, or for `steps_per_execution` steps.

    Args:
      model: The model.
      strategy: The strategy in whose scope it was created.
      name: The method of the model that performs a step on the whole batch.
    """

    def __init__(self, model: keras.Model, strategy: Strategy, name: str) -> None:
        self._model, self._topology = model, strategy.topology
        self._layout = functools.partial(strategy.placement.layout_of_kept, topology=self._topology)
        self._keeps_outputs = name == "predict_step"  # those of all steps, not only of the last
        self._last_state: State | None = None
        self._step = _step_of(model, strategy, name, self._layout)
        optimizer = getattr(model, "optimizer", None)  # it does not exist before `compile`
        for variable in (*model.variables, *(optimizer.variables if optimizer else ())):
            adopted(variable, strategy)
        agree_on_beginnings()  # Keras reads its variables directly

    def __call__(self, state: State, iterator: Iterator[Nest]) -> tuple[Nest, State]:
        data = next(iterator)
        if state is not self._last_state:  # e.g. a callback may have assigned a variable
            state = self._placed(state)
        outputs, state = self._step(state, data)
        kept = [outputs]
        for _ in range(self._model.steps_per_execution - 1):
            try:
                data = next(iterator)
            except StopIteration:
                break
            outputs, state = self._step(state, data)
            kept.append(outputs)
        self._last_state = state
        if self._keeps_outputs and len(kept) > 1:
            outputs = jax.tree.map(lambda *parts: jnp.concatenate(parts), *kept)
        return outputs, state

    def _placed(self, state: State) -> State:
        """Return a state on the devices, each array in its own memory, which a step reuses.

        Variables may share an array: after `fit`, a weight and its moving average do.
        """
        seen: set[int] = set()

        def placed(array: jax.Array) -> jax.Array:
            shared = id(array) in seen
            seen.add(id(array))
            array, layout = jnp.copy(array) if shared else array, self._layout(array)
            if layout.is_fully_replicated:
                return self._topology.replicate(array)
            return jax.device_put(array, layout)

        return jax.tree.map(placed, state)


def _step_of(model: keras.Model, strategy: Strategy, name: str, layout: Layout) -> Step:
    """Return a step of a model, as one program unless it should run eagerly."""
    label = f"`{name}` of {model.name!r}"
    if takes_data_alone(model, name):
        compiled, by_operation = (
            Stateful(model, strategy, name, compiled=compiled) for compiled in (True, False)
        )
    else:
        step = _predict_step(model) if name == "predict_step" else getattr(model, name)
        kept = name == "predict_step"
        compiled = Compiled(label, step, strategy.topology, layout, keeps_outputs=kept)
        by_operation = ByOperation(step, strategy.topology)
    if not is_compiled(model):
        return by_operation
    layers = refused_layers(model)
    return IfItTraces(label, layers, compiled, by_operation) if layers else compiled


def _predict_step(model: keras.Model) -> Step:
    """Return the step of `predict`, which returns a state like the others."""

    def step(state: State, data: Nest) -> tuple[Nest, State]:
        outputs, non_trainable = model.predict_step(state, data)
        return outputs, (state[0], non_trainable)

    return step
