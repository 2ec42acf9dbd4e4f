"""The contract of collectives: everything that looks across replicas is written over it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._describing import described
from replicax._enums import ReduceOp, VariableAggregation
from replicax.collectives._options import CommunicationOptions
from replicax.errors import InvalidType, ShapeMismatch
from replicax.values import Mirrored, PerReplica, Shape, describe_shapes, settle_shapes


class Collectives(ABC):
    """What can be made of per-replica values, whatever form these have in an execution."""

    @abstractmethod
    def reduce(
        self, op: ReduceOp, values: Sequence[PerReplica], options: CommunicationOptions
    ) -> list[Mirrored]:
        """Combines each value over the replicas, all of them in one go."""

    @abstractmethod
    def gather(self, value: PerReplica, axis: int, options: CommunicationOptions) -> Mirrored:
        """The components one after another along `axis`."""

    @abstractmethod
    def broadcast(self, value: PerReplica) -> Mirrored:
        """The first replica's component."""

    @abstractmethod
    def mirror(self, value: Any) -> Mirrored:
        """One array, brought to every replica."""

    @abstractmethod
    def as_mirrored(self, array: jax.Array) -> Mirrored:
        """An array that every replica has already."""

    @abstractmethod
    def distribute(self, values: Sequence[Any]) -> PerReplica:
        """`values[i]` for replica i."""

    def reduce_over(self, op: ReduceOp, value: PerReplica, axes: tuple[int, ...]) -> Mirrored:
        """Combines over `axes` of each component as well; components may differ in size there."""

        def local_sum(component: Any) -> jax.Array:
            array = jnp.asarray(component)
            if op is ReduceOp.MEAN:
                array = array.astype(_mean_dtype(array.dtype))
            return jnp.sum(array, axis=axes, dtype=result_dtype(op, array.dtype))

        def without_axes(shape: Shape) -> Shape:
            return tuple(size for axis, size in enumerate(shape) if axis not in axes)

        settle_shapes([value], f"reduce {op.value} over axes {axes}")
        sums = value.map(local_sum, without_axes)
        (total,) = self.reduce(ReduceOp.SUM, [sums], CommunicationOptions())
        if op is ReduceOp.SUM:
            return total
        count = self._count(value, axes)
        (sample, *_) = value.samples()
        dtype = jnp.result_type(getattr(sample, "dtype", sample))
        result = result_dtype(op, dtype)
        return total.map(lambda array: (array / jnp.asarray(count, array.dtype)).astype(result))

    def _count(self, value: PerReplica, axes: tuple[int, ...]) -> int | jax.Array:
        """The number of elements over all replicas: a last partial batch weighs what it has."""
        return sum(math.prod(shape[axis] for axis in axes) for shape in value.shapes)

    def aggregate(self, aggregation: VariableAggregation, value: PerReplica) -> Mirrored:
        """Combines what the replicas write to a variable, or have in their copies of it."""
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self.broadcast(value)
        op = ReduceOp.parse(aggregation.value)
        return self.reduce(op, [value], CommunicationOptions())[0]


def result_dtype(op: ReduceOp, dtype: Any) -> Any:
    """Means of whole numbers are fractional, and sums of truth values are counts."""
    if op is ReduceOp.MEAN and not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.result_type(float)
    return jnp.dtype(jnp.int32) if dtype == jnp.bool_ else dtype


def _mean_dtype(dtype: Any) -> Any:
    """In which type the elements of a mean are added up: a sum of many halves overflows."""
    dtype = result_dtype(ReduceOp.MEAN, dtype)
    return jnp.promote_types(dtype, jnp.float32) if dtype.itemsize < 4 else dtype


def require_numeric(value: Any, method: str) -> None:
    """Refuses components that are no numbers."""
    components = value.samples() if isinstance(value, PerReplica) else (value,)
    for component in components:
        dtype = getattr(component, "dtype", None)
        if dtype is None:
            dtype = np.asarray(component).dtype
        if not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
            raise InvalidType(
                f"`{method}` combines numbers; got {described(component)} of type "
                f"{type(component).__name__} (dtype {dtype})."
            )


def require_alike(value: PerReplica, method: str) -> None:
    """Refuses components of different shape or dtype."""
    samples = value.samples()
    dtypes = [jnp.result_type(getattr(sample, "dtype", sample)) for sample in samples]
    if len(set(dtypes)) > 1:
        seen = ", ".join(f"replica {i}: {dtype}" for i, dtype in enumerate(dtypes))
        raise InvalidType(f"`{method}` needs one dtype on all replicas; got {seen}.")
    if not value.uniform:
        raise ShapeMismatch(
            f"`{method}` needs equal shapes on all replicas; got {describe_shapes(value.shapes)}. "
            "To combine batches of different size, give `strategy.reduce` the batch axis: `axis=0`."
        )


def require_gatherable(value: PerReplica, axis: int) -> None:
    """Checks that components can be put one after another along `axis`."""
    shapes = value.shapes
    seen = describe_shapes(shapes)
    if any(not shape for shape in shapes):
        raise ShapeMismatch(
            f"`gather` needs values with at least one dimension; got {seen}. "
            "Add one with `jnp.expand_dims(x, 0)` before gathering."
        )
    if len({len(shape) for shape in shapes}) > 1:
        raise ShapeMismatch(f"`gather` needs equal ranks on all replicas; got {seen}.")
    rank = len(shapes[0])
    if isinstance(axis, bool) or not hasattr(axis, "__index__") or not 0 <= int(axis) < rank:
        raise ShapeMismatch(
            f"`gather` along axis {axis!r} is out of range: the values have rank {rank}, so the "
            f"axis is an integer from 0 to {rank - 1}. Got {seen}."
        )
    if len({(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}) > 1:
        raise ShapeMismatch(
            f"`gather` along axis {axis} needs shapes that are equal in all other dimensions; "
            f"got {seen}."
        )
