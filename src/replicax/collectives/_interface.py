"""The interface of collectives, on which everything that looks across replicas is built."""

from __future__ import annotations

import functools
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
from replicax.collectives._reductions import Axes, Reduction, reduction_of
from replicax.collectives._regroup import agree_on_shapes
from replicax.errors import InvalidType, ShapeMismatch
from replicax.values import Mirrored, PerReplica, Shape, describe_shapes

_NUMBERS = (jnp.number, jnp.bool_)


class Collectives(ABC):
    """The operations on per-replica values, in either execution."""

    @abstractmethod
    def reduce(
        self, op: ReduceOp, values: Sequence[PerReplica], options: CommunicationOptions
    ) -> list[Mirrored]:
        """Combine each value over the replicas, all values at once."""

    @abstractmethod
    def reduce_scatter(
        self, op: ReduceOp, values: Sequence[PerReplica], axis: int, options: CommunicationOptions
    ) -> list[PerReplica]:
        """Combine each value over the replicas, and leave each its part of the result along `axis`.

        This is the counterpart of `gather`: replica i of n gets the i-th of n equal parts.
        """

    @abstractmethod
    def gather(self, value: PerReplica, axis: int, options: CommunicationOptions) -> Mirrored:
        """Concatenate the components along `axis`."""

    @abstractmethod
    def broadcast(self, value: PerReplica) -> Mirrored:
        """Bring the first replica's component to every replica."""

    @abstractmethod
    def mirror(self, value: object) -> Mirrored:
        """Bring one array to every replica."""

    @abstractmethod
    def as_mirrored(self, array: jax.Array) -> Mirrored:
        """Return the mirrored value of an array that every replica already has."""

    @abstractmethod
    def distribute(self, values: Sequence[object]) -> PerReplica:
        """Return a value with `values[i]` for replica i."""

    def reduce_over(self, op: ReduceOp, value: PerReplica, axes: Axes) -> Mirrored:
        """Combine over `axes` of each component as well; components may differ in size there."""
        reduction = reduction_of(op)

        def without_axes(shape: Shape) -> Shape:
            return tuple(size for axis, size in enumerate(shape) if axis not in axes)

        agree_on_shapes([value], f"reduce {op.value} over axes {axes}")
        self._require_elements(op, value, axes)
        parts = value.map(lambda part: reduction.part(jnp.asarray(part), axes), without_axes)
        (total,) = self.reduce(reduction.parts or op, [parts], CommunicationOptions())
        if reduction.finalize is None:
            return total
        count = self._count(value, axes)
        (sample, *_) = value.samples()
        dtype = reduction.dtype(jnp.result_type(getattr(sample, "dtype", sample)))
        return total.map(
            lambda array: reduction.finished(array, jnp.asarray(count, array.dtype)).astype(dtype)
        )

    def _require_elements(self, op: ReduceOp, value: PerReplica, axes: Axes) -> None:
        """Refuse a value without elements, if `op` needs at least one."""
        if reduction_of(op).needs_elements and self._count(value, axes) == 0:
            raise ShapeMismatch(
                f"`reduce {op.value}` over axes {axes} needs at least one element; got "
                f"{describe_shapes(value.shapes)}."
            )

    def _count(self, value: PerReplica, axes: Axes) -> int | jax.Array:
        """Count the elements over all replicas, so that a partial batch is weighted by its rows."""
        return sum(math.prod(shape[axis] for axis in axes) for shape in value.shapes)

    def aggregate(self, aggregation: VariableAggregation, value: PerReplica) -> Mirrored:
        """Combine the replicas' writes to a variable, or their copies of it."""
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return self.broadcast(value)
        op = ReduceOp.parse(aggregation.value)
        return self.reduce(op, [value], CommunicationOptions())[0]


def require_numeric(value: object, method: str, reduction: Reduction | None = None) -> None:
    """Refuse components that are not numbers, or not of a kind that `reduction` can combine."""
    kinds = _NUMBERS if reduction is None else reduction.kinds
    components = value.samples() if isinstance(value, PerReplica) else (value,)
    for component in components:
        dtype = getattr(component, "dtype", None)
        if dtype is None:
            dtype = np.asarray(component).dtype
        if not _is_of(dtype, kinds):
            names = ", ".join(kind.__name__ for kind in kinds)
            raise InvalidType(
                f"`{method}` combines numbers ({names}); got {described(component)} of type "
                f"{type(component).__name__} (dtype {dtype})."
            )


@functools.lru_cache(maxsize=256)  # every eager reduction asks this for each value
def _is_of(dtype: Any, kinds: tuple[Any, ...]) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in kinds)


def require_alike(value: PerReplica, method: str) -> None:
    """Refuse components of different shape or dtype."""
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


def require_scatterable(value: PerReplica, axis: int, replicas: int) -> None:
    """Check that components can be divided along `axis`, into one part per replica."""
    shape = value.shapes[0]
    if not 0 <= axis < len(shape) or shape[axis] % replicas:
        raise ShapeMismatch(
            f"`reduce_scatter` along axis {axis!r} needs values whose size there can be divided "
            f"by {replicas}, the number of replicas; got {describe_shapes(value.shapes)}."
        )


def require_gatherable(value: PerReplica, axis: int) -> None:
    """Check that components can be concatenated along `axis`."""
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
