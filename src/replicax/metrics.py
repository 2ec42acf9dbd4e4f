"""`rx.metrics`: averages and sums over all replicas that cost no communication until read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import jax
import jax.numpy as jnp
from jax.dtypes import canonicalize_dtype
from numpy.typing import ArrayLike

from replicax import _context, checkpoint
from replicax._context import ContextKind
from replicax._enums import VariableAggregation, VariableSynchronization
from replicax._typing import Leaf, Nest
from replicax._weights import real_array, weights_for
from replicax.checkpoint import NameOf, ObjectEntries
from replicax.errors import InvalidArgument, ShapeMismatch
from replicax.strategies import get_strategy
from replicax.values import PerReplica
from replicax.variables import Variable

if TYPE_CHECKING:
    import numpy as np
    from jax.typing import DTypeLike


__all__ = ["Accuracy", "Mean", "Metric", "Sum"]


class Metric(ABC):
    """A value that is accumulated over many batches: the base of all metrics.

    Create it in the strategy's scope. Its variables are ON_READ and summed, so that each replica
    updates its own copies in `run`, and a read outside of `run` combines all replicas. For a
    metric of your own, name its sums, and define their increments and the result:

    >>> import jax.numpy as jnp, replicax as rx
    >>> class RootMeanSquare(rx.metrics.Metric):
    ...     def __init__(self, name="rms", dtype=None):
    ...         super().__init__(name, dtype, sums=("squares", "count"))
    ...     def increments(self, values):
    ...         return jnp.sum(values**2), values.size
    ...     def result(self):
    ...         squares, count = self.variables
    ...         return jnp.sqrt(squares / count)
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     metric = RootMeanSquare()
    >>> strategy.run(metric.update_state, args=(jnp.array([3.0, -3.0]),))
    >>> metric.result()
    Array(3., dtype=float32)

    Args:
      name: A name for messages and checkpoints.
      dtype: The type of the sums, a floating point one; by default JAX's usual one, float32.
      sums: The names of the sums. Each is a scalar that begins with zero.
    """

    def __init__(self, name: str, dtype: DTypeLike | None = None, *, sums: Sequence[str]) -> None:
        self._name = name
        self._dtype = canonicalize_dtype(float if dtype is None else dtype)
        if not jnp.issubdtype(self._dtype, jnp.floating):
            raise InvalidArgument(
                f"The metric {name!r} must have a floating point dtype; got {self._dtype}. Leave "
                "it out for float32."
            )
        self._sums = {
            each: Variable(
                jnp.zeros((), self._dtype),
                trainable=False,
                name=f"{name}/{each}",
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
            for each in sums
        }

    @abstractmethod
    def increments(self, *args: Nest, **kwargs: Nest) -> Sequence[ArrayLike]:
        """Return the increments of the sums for the arguments of `update_state`, in order."""

    @abstractmethod
    def result(self) -> jax.Array:
        """Return the value: in `run` for this replica's data, outside for that of all replicas."""

    @property
    def name(self) -> str:
        """The name."""
        return self._name

    @property
    def dtype(self) -> np.dtype:
        """The type of the sums."""
        return self._dtype

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The sums."""
        return tuple(self._sums.values())

    def update_state(self, *args: Nest, **kwargs: Nest) -> None:
        """Add values.

        In `run`, each replica adds its own. Outside, a per-replica value is added by each replica,
        and any other value once.
        """
        frame = _context.current()
        strategy = self.variables[0].strategy
        in_replica = frame.kind is ContextKind.REPLICA and frame.strategy is strategy
        if in_replica and frame.replica is not None:
            self._add(*args, **kwargs)
        elif any(isinstance(each, PerReplica) for each in (*args, *kwargs.values())):
            (strategy or get_strategy()).run(self._add, args, kwargs)
        elif strategy is None or in_replica:
            self._add(*args, **kwargs)
        else:
            strategy.run(self._add_once, args, kwargs)

    def __call__(self, *args: Nest, **kwargs: Nest) -> jax.Array:
        """Add values, and return the result."""
        self.update_state(*args, **kwargs)
        return self.result()

    def reset_state(self) -> None:
        """Reset the sums to zero: in `run` for this replica, outside for all."""
        for variable in self.variables:
            variable.assign(jnp.zeros((), self._dtype))

    def reset_states(self) -> None:
        """Do the same as `reset_state`, by its older name."""
        self.reset_state()

    def _list_entries(self, _: NameOf) -> ObjectEntries:
        """Return the entries of the metric in a checkpoint."""
        return ObjectEntries({name: checkpoint.entry_of(each) for name, each in self._sums.items()})

    def _add(self, *args: Nest, **kwargs: Nest) -> None:
        self._add_times(1, args, kwargs)

    def _add_once(self, *args: Nest, **kwargs: Nest) -> None:
        """Add values that all replicas were given, on the first replica only."""
        frame = _context.current()
        assert frame.replica is not None
        self._add_times(frame.replica.replica_id_in_sync_group == 0, args, kwargs)

    def _add_times(self, times: jax.Array | bool | int, args: Nest, kwargs: Nest) -> None:
        added = [jnp.asarray(each, self._dtype) for each in self.increments(*args, **kwargs)]
        for variable, each in zip(self.variables, added, strict=True):
            variable.assign_add(jnp.where(times, each, 0))

    def __repr__(self) -> str:
        return f"<rx.metrics.{type(self).__name__} {self._name!r}>"


@final
class Mean(Metric):
    """The weighted mean of all values.

    >>> import numpy as np, replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     loss = rx.metrics.Mean(name="loss")
    >>> x = strategy.experimental_distribute_values_from_function(
    ...     lambda context: np.float32([[1, 2, 3], [6]][context.replica_id_in_sync_group]))
    >>> strategy.run(loss.update_state, args=(x,))
    >>> loss.result()
    Array(3., dtype=float32)

    Args:
      name: A name for messages and checkpoints.
      dtype: The type to add up in; by default float32.
    """

    def __init__(self, name: str = "mean", dtype: DTypeLike | None = None) -> None:
        super().__init__(name, dtype, sums=("total", "count"))

    def update_state(self, values: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Add values.

        In `run`, each replica adds its own. Outside, a per-replica value is added by each replica,
        and any other value once.

        Args:
          values: An array, each element of which counts.
          sample_weight: Weights: one for all, one per row, or one per element.
        """
        super().update_state(*_arrays(self, values=values, sample_weight=sample_weight))

    def increments(self, values: ArrayLike, sample_weight: ArrayLike | None) -> Sequence[ArrayLike]:
        return _weighted_sums(self, values, sample_weight)

    def result(self) -> jax.Array:
        """Return the mean, or 0 without values: in `run` for this replica, outside for all."""
        return _ratio(*self.variables)


@final
class Sum(Metric):
    """The weighted sum of all values.

    Args:
      name: A name for messages and checkpoints.
      dtype: The type to add up in; by default float32.
    """

    def __init__(self, name: str = "sum", dtype: DTypeLike | None = None) -> None:
        super().__init__(name, dtype, sums=("total",))

    def update_state(self, values: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Add values; the arguments are those of `Mean.update_state`."""
        super().update_state(*_arrays(self, values=values, sample_weight=sample_weight))

    def increments(self, values: ArrayLike, sample_weight: ArrayLike | None) -> Sequence[ArrayLike]:
        return _weighted_sums(self, values, sample_weight)[:1]

    def result(self) -> jax.Array:
        """Return the sum: in `run` for this replica, outside for all."""
        return self.variables[0].value


@final
class Accuracy(Metric):
    """The fraction of predicted labels that are the true ones.

    >>> import jax.numpy as jnp, replicax as rx
    >>> accuracy = rx.metrics.Accuracy()
    >>> accuracy(jnp.array([1, 2, 3, 4]), jnp.array([0, 2, 3, 4]))
    Array(0.75, dtype=float32)

    Args:
      name: A name for messages and checkpoints.
      dtype: The type to count in; by default float32.
    """

    def __init__(self, name: str = "accuracy", dtype: DTypeLike | None = None) -> None:
        super().__init__(name, dtype, sums=("total", "count"))

    def update_state(
        self,
        y_true: ArrayLike,
        y_pred: ArrayLike,
        sample_weight: ArrayLike | None = None,
    ) -> None:
        """Compare labels.

        In `run`, each replica compares its own. Outside, each replica compares per-replica values,
        and other values are compared once.

        Args:
          y_true: The true labels.
          y_pred: The predicted labels, in the same shape; for scores, pass their `argmax(axis=-1)`.
          sample_weight: Weights: one for all, one per row, or one per element.
        """
        super().update_state(
            *_arrays(self, y_true=y_true, y_pred=y_pred, sample_weight=sample_weight)
        )

    def increments(
        self, y_true: ArrayLike, y_pred: ArrayLike, sample_weight: ArrayLike | None
    ) -> Sequence[ArrayLike]:
        method = f"update_state of {self!r}"
        true, predicted = (
            real_array(labels, method, argument)
            for labels, argument in ((y_true, "y_true"), (y_pred, "y_pred"))
        )
        if true.shape != predicted.shape:
            raise ShapeMismatch(
                f"`{method}` compares labels one by one; got y_true of shape {true.shape} and "
                f"y_pred of shape {predicted.shape}. Bring them to one shape; of scores, pass "
                "`y_pred.argmax(axis=-1)`."
            )
        return _weighted_sums(self, true == predicted, sample_weight)

    def result(self) -> jax.Array:
        """Return the accuracy, or 0 without labels: in `run` for this replica, outside for all."""
        return _ratio(*self.variables)


def _arrays(metric: Metric, **arguments: Nest) -> list[Leaf]:
    """Return the arguments with Python numbers as arrays: each number would need a program."""
    return [
        real_array(value, f"update_state of {metric!r}", argument)
        if isinstance(value, (bool, int, float, list, tuple))
        else value
        for argument, value in arguments.items()
    ]


def _weighted_sums(
    metric: Metric, values: ArrayLike, sample_weight: ArrayLike | None
) -> tuple[ArrayLike, ArrayLike]:
    """Return the weighted sum of the values, and the sum of their weights."""
    method = f"update_state of {metric!r}"
    values = real_array(values, method, "values").astype(metric.dtype)
    if sample_weight is None:
        return jnp.sum(values), values.size
    weights = weights_for(values, sample_weight, method)
    return jnp.sum(values * weights), jnp.sum(weights)


def _ratio(total: Variable, count: Variable) -> jax.Array:
    """Return a mean, or 0 if nothing was counted."""
    sums, counts = total.value, count.value
    return jnp.where(counts == 0, 0, sums / jnp.where(counts == 0, 1, counts))


checkpoint.register(
    checkpoint.TypeHandler(lambda thing: isinstance(thing, Metric), Metric._list_entries)
)
