"""The data for `fit`, `evaluate` and `predict`, in a form that Keras accepts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

import jax
import keras

from replicax import cluster
from replicax._typing import Json, Nest
from replicax.errors import CollectiveMismatch, InvalidArgument
from replicax.input import (
    INFINITE_CARDINALITY,
    DistributedDataset,
    DistributedIterator,
    of_a_library,
)
from replicax.integrations.keras._order import generators, set_generators
from replicax.integrations.keras._private import DataAdapter
from replicax.integrations.keras._rows import rows_of_element
from replicax.strategies import Strategy


@final
class DistributedDataAdapter(DataAdapter):
    """The elements of a distributed dataset; every epoch is a new pass."""

    def __init__(self, dataset: DistributedDataset, strategy: Strategy) -> None:
        self._dataset, self._topology = dataset, strategy.topology
        self._iterator: DistributedIterator | None = None
        self._resumed: Any = None

    def symbols(self) -> Nest:
        """Return a symbolic batch, to build a model with."""
        return jax.tree.map(
            lambda spec: keras.KerasTensor(spec.shape, spec.dtype), self._dataset.element_spec
        )

    def get_jax_iterator(self) -> Iterator[Nest]:
        self._iterator = iter(self._dataset)
        if self._resumed is not None:
            self._iterator.set_state(self._resumed)
            self._resumed = None
        for element in self._iterator:
            yield jax.tree.map(lambda leaf: rows_of_element(leaf, self._topology), element)

    def get_state(self) -> Json:
        """Return the position in the current pass."""
        return self._iterator and self._iterator.get_state()

    def is_over(self) -> bool:
        """Tell whether the current pass has ended."""
        return self._iterator is None or not self._iterator._peek(1)

    def resume(self, state: object) -> None:
        """Make the next pass begin at this position."""
        self._resumed = state

    @property
    def num_batches(self) -> int | None:
        steps = self._dataset.cardinality
        return steps if steps >= 0 else None

    @property
    def batch_size(self) -> None:
        return None

    @property
    def has_partial_batch(self) -> bool:
        return False

    @property
    def partial_batch_size(self) -> None:
        return None


_STEPS = {"fit": "steps_per_epoch", "validation": "validation_steps"}


def prepared(data: object, strategy: Strategy, method: str, steps: int | None) -> object:
    """Return the data to give Keras in place of the user's.

    Workers share a dataset. Arrays and other data are complete on every worker, which takes its
    replicas' rows of each batch.
    """
    if isinstance(data, DistributedDataset):
        if data.topology != strategy.topology:
            raise InvalidArgument(
                f"`{method}` got {data!r}, which is distributed over {data.topology}, and the "
                f"model belongs to {strategy!r}. Distribute the dataset with the model's strategy."
            )
        if data.cardinality == INFINITE_CARDINALITY and steps is None:
            raise InvalidArgument(
                f"`{method}` got {data!r}, which never ends. Say how many steps are wanted, by "
                f"`{_STEPS.get(method, 'steps')}=`."
            )
        return DistributedDataAdapter(data, strategy)
    if strategy.topology.spans_processes and of_a_library(data):
        return DistributedDataAdapter(strategy.experimental_distribute_dataset(data), strategy)
    return data


def agree(strategy: Strategy, method: str, given: Mapping[str, object]) -> None:
    """Check that all workers call a method with the same settings and data of the same shapes.

    Afterwards they all shuffle arrays in the first worker's order.
    """
    if not strategy.topology.spans_processes:
        return
    session = cluster.current()
    facts = {
        argument: _described(value)
        for argument, value in given.items()
        if argument not in ("self", "callbacks", "verbose", "kwargs")
    }
    brought = session.all_gather(f"`{method}` of a Keras model", [facts, generators()])
    for argument in {name: None for each, _ in brought for name in each}:
        words = [each.get(argument, "nothing") for each, _ in brought]
        if len(set(words)) > 1:
            seen = "; ".join(
                f"{name} got {word}"
                for name, word in zip(session.members.names, words, strict=True)
            )
            raise CollectiveMismatch(
                f"The workers do not call `{method}` with the same `{argument}`: {seen}. Give all "
                "of them the same arrays, of which each takes its rows, and the same settings; or "
                "a dataset, which they share."
            )
    set_generators(brought[0][1])


def _described(value: object) -> str:
    """Describe an argument by what must be the same on all workers."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    leaves = jax.tree.leaves(value)
    if all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves):
        return ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    return type(value).__name__
