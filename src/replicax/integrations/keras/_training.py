"""The steps of a model's `fit`, `evaluate` and `predict`, as programs over all devices.

A program computes what one device would on the whole batch; XLA divides the work over the replicas,
because the rows of the batch are divided. So it is exact for layers that look across a batch, such
as BatchNormalization, and for random numbers, and the same as without a strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, final

import jax
import jax.numpy as jnp
import keras

from replicax._typing import Nest
from replicax.collectives import launch
from replicax.integrations.keras._products import without_transposed_products
from replicax.integrations.keras._rows import Rows, cut, is_rows, rows_of
from replicax.integrations.keras._variables import adopted
from replicax.strategies import Strategy
from replicax.topology import Topology

State = tuple[list[jax.Array], ...]
Step = Callable[[State, Nest], tuple[Nest, State]]


def train_function(model: keras.Model, strategy: Strategy) -> StepFunction:
    return StepFunction(model, strategy, "train_step", model.train_step)


def test_function(model: keras.Model, strategy: Strategy) -> StepFunction:
    return StepFunction(model, strategy, "test_step", model.test_step)


def predict_function(model: keras.Model, strategy: Strategy) -> StepFunction:
    def step(state: State, data: Nest) -> tuple[Nest, State]:
        outputs, non_trainable = model.predict_step(state, data)
        return outputs, (state[0], non_trainable)

    return StepFunction(model, strategy, "predict_step", step, keeps_outputs=True)


@final
class StepFunction:
    """What Keras calls for one step, or for as many as `steps_per_execution` says.

    Args:
      model: The model.
      strategy: That in whose scope it was made.
      name: What the step is called.
      step: The step of the model, on the whole batch.
      keeps_outputs: Whether the outputs of all steps are wanted, one after another, and not those
        of the last.
    """

    def __init__(
        self,
        model: keras.Model,
        strategy: Strategy,
        name: str,
        step: Step,
        keeps_outputs: bool = False,
    ) -> None:
        self._model, self._topology = model, strategy.topology
        self._keeps_outputs = keeps_outputs
        self._last_state: State | None = None
        self._step: Step = _ByOperation(step, strategy.topology)
        if model.jit_compile and not model.run_eagerly:
            label = f"`{name}` of {model.name!r}"
            self._step = _Compiled(label, step, strategy.topology, keeps_outputs)
        optimizer = getattr(model, "optimizer", None)  # not there before `compile`
        for variable in (*model.variables, *(optimizer.variables if optimizer else ())):
            adopted(variable, strategy)

    def __call__(self, state: State, iterator: Iterator[Nest]) -> tuple[Nest, State]:
        data = next(iterator)
        if state is not self._last_state:  # a callback, say, may have assigned something
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
        """The arrays of a state on all devices, each in memory of its own, which a step reuses.

        Variables may share an array: after `fit`, a weight and its moving average do.
        """
        seen: set[int] = set()

        def placed(array: jax.Array) -> jax.Array:
            shared = id(array) in seen
            seen.add(id(array))
            return self._topology.replicate(jnp.copy(array) if shared else array)

        return jax.tree.map(placed, state)


@final
class _Compiled:
    """A step as one program."""

    def __init__(self, label: str, step: Step, topology: Topology, keeps_outputs: bool) -> None:
        self._label, self._topology = label, topology
        # Outputs that are kept stay divided, where they can and one process can read them.
        self._divided = keeps_outputs and not topology.spans_processes
        whole = topology.replicated

        def program(state: State, arrays: list[Any], structure: Any, counts: Any) -> Any:
            rows = [cut(array, count) for array, count in zip(arrays, counts, strict=True)]
            return without_transposed_products(step)(state, jax.tree.unflatten(structure, rows))

        def compiled(outputs: Any) -> Callable[..., tuple[Nest, State]]:
            return jax.jit(
                program,
                static_argnums=(2, 3),
                donate_argnums=0,
                out_shardings=(outputs, whole),
            )

        self._whole, self._even = compiled(whole), compiled(None)

    def __call__(self, state: State, data: Nest) -> tuple[Nest, State]:
        leaves, structure = jax.tree.flatten(data, is_leaf=is_rows)
        leaves = [rows_of(leaf, self._topology) for leaf in leaves]
        counts = tuple(leaf.counts if isinstance(leaf, Rows) else None for leaf in leaves)
        arrays = [leaf.array if isinstance(leaf, Rows) else leaf for leaf in leaves]
        even = self._divided and all(count is None for count in counts)
        program = self._even if even else self._whole
        return launch(self._topology, self._label, program, state, arrays, structure, counts)


@final
class _ByOperation:
    """A step without a program: every device computes all of the batch, one by one, as Python goes.

    For debugging. Were the rows divided, nearly every operation would have the devices meet.
    """

    def __init__(self, step: Step, topology: Topology) -> None:
        self._step, self._topology = step, topology
        self._everywhere = jax.jit(cut, static_argnums=1, out_shardings=topology.replicated)

    def __call__(self, state: State, data: Nest) -> tuple[Nest, State]:
        return self._step(state, jax.tree.map(self._whole, data, is_leaf=is_rows))

    def _whole(self, leaf: Any) -> jax.Array:
        if isinstance(leaf, Rows):
            return launch(
                self._topology, "gathering a batch", self._everywhere, leaf.array, leaf.counts
            )
        return self._topology.replicate(leaf)
