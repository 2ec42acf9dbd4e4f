"""Distributed values: the common base of `PerReplica` and `Mirrored`.

Both are views of one global `jax.Array` over the mesh of a topology, or of a tuple of components,
or of both: whichever a caller asks for is made from the other on demand and kept. Compiled
programs take and return global arrays, eager replicas components; neither pays for the other.
Inside the part of a program that every replica runs, the array is the replica's own component.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from replicax import _context
from replicax._typing import Leaf
from replicax.errors import InvalidArgument, InvalidType, NotPicklable
from replicax.topology import Topology
from replicax.values._device_put import without_replicas

Shape = tuple[int, ...]


class _NoAttribute(InvalidType, AttributeError):
    """The error for a value that is not an array, which `hasattr` and `getattr` understand too."""


class DistributedValues(ABC):
    """A value with one component for each replica of a strategy.

    It is a leaf in every nest: `jax.tree.map` sees the whole value, not its components.
    """

    __slots__ = ("__weakref__", "_array", "_components", "_inside", "_topology")

    _topology: Topology | None
    _components: tuple[Any, ...] | None
    _array: jax.Array | None
    _inside: bool

    def __init__(self, values: Sequence[Any], topology: Topology | None = None) -> None:
        if not values:
            raise InvalidArgument(
                f"{type(self).__name__} needs one component per replica; got none."
            )
        if topology is not None and len(values) != len(topology.local_replicas):
            raise InvalidArgument(
                f"{type(self).__name__} got {len(values)} component(s) for "
                f"{len(topology.local_replicas)} replica(s)."
            )
        self._topology = topology
        self._components = tuple(values)
        self._array = None
        self._inside = False

    @property
    def whole(self) -> jax.Array | None:
        """The global array, if it has been made."""
        return self._array

    @property
    def topology(self) -> Topology | None:
        """The topology that the value was made for; None for a value made by hand."""
        return self._topology

    @property
    def values(self) -> tuple[Any, ...]:
        """The components of the local replicas, in the order of the replicas."""
        if self._components is None:
            self._components = self._take_apart()
        return self._components

    @property
    def primary(self) -> Leaf:
        """The component of the first local replica."""
        return self.values[0]

    def component(self, index: int) -> Leaf:
        """Return the component of local replica `index`; inside a program, the replica's own."""
        return self._array if self._inside else self.values[index]

    def replaced(self, index: int, component: Leaf) -> Self:
        """Return the value with another component, of the same shape, for local replica `index`."""
        if self._inside:
            return self._of_array(component, self._topology, True)
        values = self.values
        return type(self)((*values[:index], component, *values[index + 1 :]), self._topology)

    def own_component(self) -> Leaf | None:
        """Return the component of the running replica, or None if none of its replicas is running.

        This is for values that a function closes over; its arguments have been taken apart already.
        """
        if not self._is_captured():
            return None
        frame = _context.current()
        assert frame.replica is not None
        return self.component(frame.replica.local_index)

    def _is_captured(self) -> bool:
        """Tell whether one of its replicas is running, whose code closes over the value."""
        frame = _context.current()
        if frame.replica is None or frame.strategy is None or self._inside:
            return False
        topology = frame.strategy.topology
        if self._topology is None:
            return len(self.values) == len(topology.local_replicas)
        return self._topology == topology

    @abstractmethod
    def array(self, topology: Topology) -> jax.Array:
        """Return the global array over the mesh of `topology`."""

    # The following treat the value as an array, and raise where it is not one.

    @property
    def shape(self) -> Shape:
        return self._attribute("shape")

    @property
    def dtype(self) -> np.dtype:
        return self._attribute("dtype")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @abstractmethod
    def _as_array(self) -> jax.Array:
        """Return the array that the value stands for here; raise if it stands for several."""

    @abstractmethod
    def known(self) -> jax.Array | jax.ShapeDtypeStruct:
        """Return the array, or its shape and dtype, without computing anything."""

    def _attribute(self, name: str) -> Any:
        return self._attribute_of(self.known, name)

    @staticmethod
    def _attribute_of(array: Callable[[], object], name: str) -> object:
        try:
            return getattr(array(), name)
        except InvalidType as error:
            raise _NoAttribute(str(error)) from None

    @classmethod
    def _of_array(cls, array: jax.Array, topology: Topology | None, inside: bool) -> Self:
        self = cls.__new__(cls)
        self._topology, self._components, self._array = topology, None, array
        self._inside = inside
        return self

    def _take_apart(self) -> tuple[jax.Array, ...]:
        """Return the components of the global array: the part on each replica's device."""
        assert self._array is not None
        assert self._topology is not None
        topology, array = self._topology, self._array
        if topology.logical_devices_per_replica == 1:
            held = {shard.device: shard.data for shard in array.addressable_shards}
            return tuple(held[device] for device in topology.local_devices)
        array, shape, spec = self._parts(array, topology)
        held = {shard.device: shard.data for shard in array.addressable_shards}
        return tuple(
            jax.make_array_from_single_device_arrays(
                shape, sharding, [held[device] for device in topology.devices[replica]]
            )
            for replica, sharding in zip(
                topology.local_replicas, topology.local_shardings_by(spec), strict=True
            )
        )

    @staticmethod
    def _parts(array: jax.Array, topology: Topology) -> tuple[jax.Array, Shape, PartitionSpec]:
        """Return a global array, and the shape and layout of the part on a replica's devices."""
        spec = getattr(array.sharding, "spec", ())
        return array, array.shape, PartitionSpec(*map(without_replicas, spec))

    def block_until_ready(self) -> Self:
        """Wait until all components are computed; `jax.block_until_ready` calls this."""
        jax.block_until_ready(list(self.values))
        return self

    def __repr__(self) -> str:
        lines = ",\n".join(f"  {i}: {component!r}" for i, component in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{lines}\n}}"

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(
            f"{type(self).__name__} cannot be pickled: its components are on the devices of this "
            "process. Pickle `[np.asarray(x) for x in value.values]`, or the result of "
            "`strategy.gather`."
        )


def known_of(component: jax.Array) -> jax.Array | jax.ShapeDtypeStruct:
    """Return a component as an array, or its shape and dtype."""
    if isinstance(component, (jax.Array, jax.ShapeDtypeStruct)):
        return component
    return jax.ShapeDtypeStruct(np.shape(component), jnp.result_type(component))
