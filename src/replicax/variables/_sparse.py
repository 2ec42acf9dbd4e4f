"""Reads and writes of some elements of a variable, under the names of the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from replicax import _context
from replicax._enums import VariableAggregation, VariableSynchronization
from replicax._typing import Nest
from replicax.errors import InvalidArgument, InvalidType, ShapeMismatch

if TYPE_CHECKING:
    from replicax._typing import ArrayLike
    from replicax.variables._variable import Variable


@final
@dataclass(frozen=True, slots=True)
class IndexedSlices:
    """Some rows of an array: `values[i]` is row `indices[i]`.

    >>> import replicax as rx
    >>> variable = rx.Variable([1.0, 2.0, 3.0])
    >>> variable.scatter_add(rx.IndexedSlices([10.0, 20.0], [0, 2])).numpy().tolist()
    [11.0, 2.0, 23.0]
    """

    values: Any
    indices: Any
    dense_shape: object = None


jax.tree_util.register_dataclass(IndexedSlices, ["values", "indices"], ["dense_shape"])


class SparseAccess:
    """Methods of variables that read or write the elements at given indices.

    `scatter_add` and `scatter_sub` are `assign_add` and `assign_sub` of an array that is zero
    elsewhere; the others are `assign` of the value with some elements changed. So replicas combine
    what they write as the variable's aggregation says. An index that occurs twice counts twice in
    sums, and takes one of its values in `scatter_update`.
    """

    __slots__ = ()

    def scatter_add(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Add to some rows."""
        return self._variable.assign_add(self._delta(*_rows(sparse_delta)))

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Subtract from some rows."""
        return self._variable.assign_sub(self._delta(*_rows(sparse_delta)))

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Set some rows."""
        return self._change("set", *_rows(sparse_delta))

    def scatter_max(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Set some rows to the maximum of their values and the given ones."""
        return self._change("max", *_rows(sparse_delta))

    def scatter_min(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Variable:
        """Set some rows to the minimum of their values and the given ones."""
        return self._change("min", *_rows(sparse_delta))

    def scatter_nd_add(
        self, indices: ArrayLike, updates: ArrayLike, name: str | None = None
    ) -> Variable:
        """Add to the elements, or slices, at `indices`, whose last dimension is an index."""
        return self._variable.assign_add(self._delta(_places(indices), updates))

    def scatter_nd_sub(
        self, indices: ArrayLike, updates: ArrayLike, name: str | None = None
    ) -> Variable:
        """Subtract from the elements, or slices, at `indices`."""
        return self._variable.assign_sub(self._delta(_places(indices), updates))

    def scatter_nd_update(
        self, indices: ArrayLike, updates: ArrayLike, name: str | None = None
    ) -> Variable:
        """Set the elements, or slices, at `indices`."""
        return self._change("set", _places(indices), updates)

    def sparse_read(self, indices: ArrayLike, name: str | None = None) -> jax.Array:
        """Return the rows at `indices`."""
        return self._at((_known_indices(indices),)).get()

    def gather_nd(self, indices: ArrayLike, name: str | None = None) -> jax.Array:
        """Return the elements, or slices, at `indices`, whose last dimension is an index."""
        return self._at(_places(indices)).get()

    @property
    def _variable(self) -> Variable:
        return self  # pyright: ignore[reportReturnType]  variables are the only subclass

    def _delta(self, places: tuple[object, ...], updates: object) -> jax.Array:
        zeros = jnp.zeros(self._variable.shape, self._variable.dtype)
        return self._at(places, zeros, updates).add(self._fitting(updates))

    def _change(self, how: str, places: tuple[object, ...], updates: object) -> Variable:
        self._require_no_sum(how)
        changed = getattr(self._at(places, None, updates), how)(self._fitting(updates))
        return self._variable.assign(changed)

    def _at(self, places: tuple[Any, ...], array: Any = None, updates: Any = None) -> Any:
        """Return JAX's view of the elements at `places`, of the value or of `array`."""
        shape = self._variable.shape
        _require_within(places, shape, self._variable.name)
        if updates is not None:
            wanted = (*places[0].shape, *shape[len(places) :])
            if np.shape(updates) != wanted:
                raise ShapeMismatch(
                    f"The indices name elements of shape {wanted} of variable "
                    f"{self._variable.name!r}; got updates of shape {np.shape(updates)}."
                )
        return (self._variable.value if array is None else array).at[places]

    def _fitting(self, updates: object) -> jax.Array:
        variable = self._variable
        array = jnp.asarray(updates)
        if not jnp.can_cast(array.dtype, variable.dtype, "same_kind"):
            raise InvalidType(
                f"Variable {variable.name!r} has dtype {variable.dtype}; got updates of dtype "
                f"{array.dtype}. Convert them first."
            )
        return array.astype(variable.dtype)

    def _require_no_sum(self, how: str) -> None:
        """Refuse writes that would sum elements that no replica has changed."""
        variable, replica = self._variable, _context.current().replica
        several = replica is not None and replica.num_replicas_in_sync > 1
        own_copies = variable.synchronization is VariableSynchronization.ON_READ
        if several and not own_copies and variable.aggregation is VariableAggregation.SUM:
            raise InvalidArgument(
                f"Variable {variable.name!r} sums what replicas write, so that elements at other "
                f"indices would be added up too. Use `scatter_add`, call `scatter_{how}` outside "
                "of `run`, or create the variable with another `aggregation` than SUM."
            )


def _rows(slices: object) -> tuple[tuple[Any, ...], Any]:
    if not isinstance(slices, IndexedSlices):
        raise InvalidType(
            f"`sparse_delta` must be an `rx.IndexedSlices`; got {type(slices).__name__}. For "
            "indices of several dimensions there is `scatter_nd_add` and its kin."
        )
    return (_known_indices(slices.indices),), slices.values


def _places(indices: object) -> tuple[Any, ...]:
    array = _known_indices(indices)
    if not array.ndim or not array.shape[-1]:
        raise ShapeMismatch(
            f"`indices` must have a last dimension, which is an index; got shape {array.shape}. "
            "For rows there is `sparse_read`, and `scatter_add` and its kin."
        )
    return tuple(array[..., axis] for axis in range(array.shape[-1]))


def _known_indices(indices: object) -> Any:
    """Return indices as NumPy arrays, which can be inspected while something is traced."""
    return indices if isinstance(indices, Tracer) else np.asarray(indices)


def _require_within(places: tuple[Nest, ...], shape: tuple[int, ...], name: str) -> None:
    """Refuse indices that JAX would drop, or count from the end, unless they are traced."""
    if len(places) > len(shape):
        raise ShapeMismatch(
            f"Variable {name!r} has shape {shape}; got indices of {len(places)} dimension(s)."
        )
    for place, size in zip(places, shape, strict=False):
        if not jnp.issubdtype(place.dtype, jnp.integer):
            raise InvalidType(f"Indices must be whole numbers; got dtype {place.dtype}.")
        if isinstance(place, Tracer) or not place.size:
            continue
        low, high = int(place.min()), int(place.max())
        if low < 0 or high >= size:
            raise InvalidArgument(
                f"Variable {name!r} has shape {shape}; got an index of {low if low < 0 else high} "
                f"where 0 to {size - 1} are allowed."
            )
