"""Values that are the same on every replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from replicax._jax_compat import accept_as_array
from replicax._operators import ArrayOperators
from replicax._typing import Nest
from replicax.topology import Topology
from replicax.values._device_put import assembled
from replicax.values._distributed import DistributedValues, known_of


@final
class Mirrored(ArrayOperators, DistributedValues):
    """A value that is the same on every replica, with a copy on each of their devices.

    It is usable as an array: as the copy of the first replica or, in a function given to `run`, as
    the copy of the running replica.
    """

    __slots__ = ()

    @classmethod
    def from_array(cls, array: jax.Array, topology: Topology, *, inside: bool = False) -> Mirrored:
        """Make a value from an array that is replicated over the devices of `topology`."""
        return cls._of_array(array, topology, inside)

    def map(self, function: Callable[[Any], Nest]) -> Mirrored:
        """Apply `function` to the value, on every device."""
        assert self._topology is not None
        array = function(self.array(self._topology))
        return Mirrored.from_array(array, self._topology, inside=self._inside)

    def array(self, topology: Topology) -> jax.Array:
        """Return the global array, replicated over the devices of `topology`."""
        if self._array is None:
            if any(isinstance(c, Tracer) for c in self.values):
                return self.values[0]
            layout = topology.replicated
            first = getattr(self.values[0], "sharding", None)
            if isinstance(first, NamedSharding) and topology.is_local_sharding(first):
                layout = NamedSharding(topology.mesh, first.spec)
            self._array = assembled(np.shape(self.values[0]), layout, self.values, topology)
        return self._array

    def _take_apart(self) -> tuple[jax.Array, ...]:
        assert self._array is not None
        assert self._topology is not None
        if self._inside or isinstance(self._array, Tracer):
            return (self._array,) * len(self._topology.local_replicas)
        return super()._take_apart()

    def numpy(self) -> np.ndarray:
        """Return the value as a NumPy array."""
        return np.asarray(self.primary)

    def known(self) -> jax.Array | jax.ShapeDtypeStruct:
        own = None if self._inside else self.own_component()
        return known_of(self.primary if own is None else own)

    def _as_array(self) -> jax.Array:
        own = self.own_component()
        return jnp.asarray(self.primary if own is None else own)

    def __jax_array__(self) -> jax.Array:
        return self._as_array()


accept_as_array(Mirrored, Mirrored._as_array, Mirrored.known)
