"""Steps of a model as functions of the state and a batch, as Keras defines them on JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, final

import jax
from jax.sharding import NamedSharding
from jax.tree_util import PyTreeDef

from replicax._hints import hint
from replicax._typing import Nest
from replicax.collectives import dispatch
from replicax.integrations.keras._products import without_transposed_products
from replicax.integrations.keras._rows import Rows, cut, is_rows, rows_of
from replicax.topology import Topology

State = tuple[list[jax.Array], ...]
Step = Callable[[State, Nest], tuple[Nest, State]]
Layout = Callable[[jax.Array], NamedSharding]


class Traceable(Protocol):
    """A step as one program, which can be traced before it is run."""

    def __call__(self, state: State, data: Nest) -> tuple[Nest, State]: ...

    def trace(self, state: State, data: Nest) -> jax.stages.Traced: ...


@final
class Compiled:
    """A step as one program.

    Args:
      label: The name of the step.
      step: The function of the state and a batch.
      topology: The devices.
      layout: Returns the layout of an array of the state.
      keeps_outputs: Whether the outputs of all steps are kept.
    """

    def __init__(
        self, label: str, step: Step, topology: Topology, layout: Layout, keeps_outputs: bool
    ) -> None:
        self._label, self._topology, self._layout = label, topology, layout
        # Outputs that are kept stay divided if possible, provided that one process can read them.
        self._divided = keeps_outputs and not topology.spans_processes

        def program(
            state: State, arrays: list[jax.Array], structure: PyTreeDef, counts: Any
        ) -> Any:
            rows = [cut(array, count) for array, count in zip(arrays, counts, strict=True)]
            return without_transposed_products(step)(state, jax.tree.unflatten(structure, rows))

        self._function = program
        self._programs: dict[tuple[bool, PyTreeDef], Any] = {}

    def __call__(self, state: State, data: Nest) -> tuple[Nest, State]:
        program, arguments = self._program(state, data)
        return dispatch(self._topology, self._label, program, *arguments)

    def trace(self, state: State, data: Nest) -> jax.stages.Traced:
        """Return the program for a batch without running it; JAX caches the trace."""
        program, arguments = self._program(state, data)
        return program.trace(*arguments)

    def _program(self, state: State, data: Nest) -> tuple[Any, tuple[Any, ...]]:
        leaves, structure = jax.tree.flatten(data, is_leaf=is_rows)
        leaves = [rows_of(leaf, self._topology) for leaf in leaves]
        counts = tuple(leaf.counts if isinstance(leaf, Rows) else None for leaf in leaves)
        arrays = [leaf.array if isinstance(leaf, Rows) else leaf for leaf in leaves]
        even = self._divided and all(count is None for count in counts)
        key = even, jax.tree.structure(state)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compiled(even, state)
        return program, (state, arrays, structure, counts)

    def _compiled(self, divided: bool, state: State) -> Any:
        """Return the program, which returns the state in the layout in which it receives it."""
        outputs = None if divided else self._topology.replicated
        return jax.jit(
            self._function,
            static_argnums=(2, 3),
            donate_argnums=0,
            out_shardings=(outputs, jax.tree.map(self._layout, state)),
        )


@final
class ByOperation:
    """An eager step: every device computes the whole batch, operation by operation.

    It is for debugging. With divided rows, nearly every operation would synchronize the devices.
    """

    def __init__(self, step: Step, topology: Topology) -> None:
        self._step, self._everywhere = step, Everywhere(topology)

    def __call__(self, state: State, data: Nest) -> tuple[Nest, State]:
        return self._step(state, self._everywhere(data))


@final
class Everywhere:
    """A function that copies whole batches to every device."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._gathered = jax.jit(cut, static_argnums=1, out_shardings=topology.replicated)

    def __call__(self, data: Nest) -> Nest:
        return jax.tree.map(self._whole, data, is_leaf=is_rows)

    def _whole(self, leaf: object) -> jax.Array:
        if isinstance(leaf, Rows):
            return dispatch(
                self._topology, "gathering a batch", self._gathered, leaf.array, leaf.counts
            )
        return self._topology.replicate(leaf)


@final
class IfItTraces:
    """A step of a model that Keras would not compile: one program if JAX can trace it.

    Args:
      label: The name of the step.
      layers: The layers that keep Keras from compiling it.
      compiled: The step as one program.
      by_operation: The eager step.
    """

    def __init__(
        self, label: str, layers: Sequence[Any], compiled: Traceable, by_operation: Step
    ) -> None:
        self._label, self._layers = label, layers
        self._compiled, self._by_operation = compiled, by_operation
        self._traces: bool | None = None

    def __call__(self, state: State, data: Nest) -> tuple[Nest, State]:
        if self._traces is None:
            try:
                self._compiled.trace(state, data)
            except Exception:
                # If the mistake is the user's, the eager step raises an error too, without a hint.
                results = self._by_operation(state, data)
                self._traces = False
                self._hint()
                return results
            self._traces = True
        return (self._compiled if self._traces else self._by_operation)(state, data)

    def _hint(self) -> None:
        names = ", ".join(f"{layer.name!r} ({type(layer).__name__})" for layer in self._layers)
        hint(
            f"{self._label} is not compiled, because JAX cannot trace it: every device computes "
            "the whole batch, operation by operation. Layers that are not made for compiled "
            f"programs (`supports_jit` is False): {names}. Apply them to the dataset "
            "(`dataset.map`), or take layers that JAX can trace."
        )
