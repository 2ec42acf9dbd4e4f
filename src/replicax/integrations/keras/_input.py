"""What `fit`, `evaluate` and `predict` get, in a form that Keras takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import jax

from replicax import cluster
from replicax._typing import Nest
from replicax.errors import InvalidArgument
from replicax.input import DistributedDataset, DistributedIterator, of_a_library
from replicax.integrations.keras._order import generators, set_generators
from replicax.integrations.keras._private import DataAdapter
from replicax.integrations.keras._rows import rows_of_element
from replicax.strategies import Strategy


@final
class Elements(DataAdapter):
    """The elements of a distributed dataset; every epoch is a new pass."""

    def __init__(self, dataset: DistributedDataset, strategy: Strategy) -> None:
        self._dataset, self._topology = dataset, strategy.topology
        self._iterator: DistributedIterator | None = None
        self._resumed: Any = None

    def get_jax_iterator(self) -> Iterator[Nest]:
        self._iterator = iter(self._dataset)
        if self._resumed is not None:
            self._iterator.set_state(self._resumed)
            self._resumed = None
        for element in self._iterator:
            yield jax.tree.map(lambda leaf: rows_of_element(leaf, self._topology), element)

    def get_state(self) -> Any:
        """How far the current pass has come."""
        return self._iterator and self._iterator.get_state()

    def is_over(self) -> bool:
        """Whether the current pass has nothing more."""
        return self._iterator is None or not self._iterator.peek(1)

    def resume(self, state: Any) -> None:
        """Has the next pass begin where another one stood."""
        self._resumed = state

    @property
    def num_batches(self) -> int | None:
        try:
            return len(self._dataset)
        except TypeError:  # which shows only in reading it
            return None

    @property
    def batch_size(self) -> None:
        return None

    @property
    def has_partial_batch(self) -> bool:
        return False

    @property
    def partial_batch_size(self) -> None:
        return None


def prepared(data: Any, strategy: Strategy, method: str, steps: int | None) -> Any:
    """What is given to Keras in place of the user's data.

    Workers share a dataset. Of arrays, and of whatever else Keras takes, every worker has all, and
    takes its replicas' rows of each batch.
    """
    if isinstance(data, DistributedDataset):
        if data.topology != strategy.topology:
            raise InvalidArgument(
                f"`{method}` got {data!r}, which is distributed over {data.topology}, and the "
                f"model belongs to {strategy!r}. Distribute the dataset with the model's strategy."
            )
        if data.infinite and steps is None:
            raise InvalidArgument(
                f"`{method}` got {data!r}, which never ends. Say how many steps are wanted, by "
                f"`{'steps_per_epoch' if method == 'fit' else 'steps'}=`."
            )
        return Elements(data, strategy)
    if strategy.topology.spans_processes and of_a_library(data):
        return Elements(strategy.experimental_distribute_dataset(data), strategy)
    return data


def agree_on_order(strategy: Strategy) -> None:
    """Has Keras shuffle arrays in the same order on all workers: that of the first."""
    if not strategy.topology.spans_processes:
        return
    set_generators(cluster.current().meet("the order of examples", generators())[0])
