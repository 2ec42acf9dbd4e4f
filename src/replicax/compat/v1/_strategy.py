"""The additional methods of all strategies of v1."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, overload

from replicax import strategies
from replicax._deprecation import deprecated
from replicax._enums import InputReplicationMode, ReduceOpLike, ReplicationModeLike
from replicax._typing import ArrayLike, DatasetLike, Nest, Values
from replicax.errors import InvalidType
from replicax.execution import require_call
from replicax.input import (
    Calls,
    DistributedIterator,
    InitializableIterator,
    InputContext,
    InputOptions,
    require_iterator,
)

if TYPE_CHECKING:
    import grain
    import jax

    from replicax.strategies import Axis


class Strategy(strategies.Strategy):
    """A strategy with the methods of v1.

    >>> import warnings, numpy as np, replicax as rx
    >>> warnings.simplefilter("ignore", DeprecationWarning)
    >>> strategy = rx.compat.v1.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> iterator = strategy.make_dataset_iterator([np.arange(1, 5)])
    >>> operations = iterator.initialize()
    >>> doubled = strategy.experimental_run(lambda x: x * 2, iterator)
    >>> strategy.reduce("SUM", doubled)
    Array([ 8, 12], dtype=int32)
    >>> iterator.close()
    """

    @deprecated("Use `strategy.run(fn, args=(next(iterator),))`.")
    def experimental_run(
        self, fn: Callable[..., Nest], input_iterator: DistributedIterator | None = None
    ) -> Nest:
        """Call `run` with the next element of an iterator, if one is given, as the argument."""
        require_call("experimental_run", fn, ())
        if input_iterator is None:
            return self.run(fn)
        return self.run(fn, args=(require_iterator(input_iterator).get_next(),))

    @deprecated("Use `iter(strategy.experimental_distribute_dataset(dataset))`.")
    def make_dataset_iterator(self, dataset: DatasetLike) -> InitializableIterator:
        """Return an uninitialized iterator over a dataset of global batches."""
        return InitializableIterator(self.experimental_distribute_dataset(dataset))

    @deprecated("Use `iter(strategy.distribute_datasets_from_function(dataset_fn))`.")
    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], DatasetLike],
        replication_mode: ReplicationModeLike = InputReplicationMode.PER_WORKER,
    ) -> InitializableIterator:
        """Return an uninitialized iterator over the replicas' batches.

        Args:
          input_fn: Gets an `rx.InputContext`, and returns a dataset of batches for one replica, or
            a function that returns such a batch each time it is called and raises StopIteration
            at the end.
          replication_mode: Whether `input_fn` is called for each worker or for each replica.
        """
        options = InputOptions(experimental_replication_mode=replication_mode)
        require_call("make_input_fn_iterator", input_fn, ())

        def dataset_fn(context: InputContext) -> DatasetLike:
            made = input_fn(context)
            return Calls(made) if _gives_elements(made) else made

        return InitializableIterator(self.distribute_datasets_from_function(dataset_fn, options))

    def experimental_make_numpy_dataset(
        self, numpy_input: Nest, session: None = None
    ) -> grain.MapDataset:
        """Make a Grain dataset of the rows of a nest of arrays, as `rx.from_tensor_slices` does."""
        return self.extended.experimental_make_numpy_dataset(numpy_input, session)

    @overload
    def reduce(self, reduce_op: ReduceOpLike, value: ArrayLike, axis: Axis = None) -> jax.Array: ...
    @overload
    def reduce(self, reduce_op: ReduceOpLike, value: Values, axis: Axis = None) -> Values: ...
    def reduce(self, reduce_op: ReduceOpLike, value: Nest, axis: Axis = None) -> Nest:
        """Combine a per-replica value, or a nest of them, into plain arrays.

        Args:
          reduce_op: A `ReduceOp`, or its name.
          value: What `run` returned.
          axis: A dimension to combine over as well; None for the replicas only.
        """
        return super().reduce(reduce_op, value, axis)

    @deprecated("Leave it out: there are no sessions on JAX to configure.")
    def update_config_proto(self, config_proto: Mapping[str, Any]) -> dict[str, object]:
        """Return a copy of a session's configuration, with this strategy's additions.

        Nothing here reads it. The argument is a mapping of the fields of a `ConfigProto`.
        """
        if not isinstance(config_proto, Mapping):
            raise InvalidType(
                "`config_proto` must be a mapping of the fields of a session's configuration; "
                f"got {config_proto!r}."
            )
        return _merged(config_proto, self._session_settings())

    def _session_settings(self) -> Mapping[str, object]:
        return {}


def _gives_elements(made: object) -> bool:
    """Tell whether `made` is a function that returns elements, not a dataset or its maker."""
    return (
        callable(made)
        and not isinstance(made, (Iterable, type))
        and not inspect.isgeneratorfunction(made)
    )


def _merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, object]:
    merged = copy.deepcopy(dict(config))
    for name, change in changes.items():
        nested = isinstance(change, Mapping)
        merged[name] = _merged(merged.get(name, {}), change) if nested else change
    return merged
