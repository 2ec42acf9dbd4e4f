"""PerReplica and Mirrored.

Both are views of one global `jax.Array` over the mesh of a topology, or of a tuple of components,
or of both: whichever a caller asks for is made from the other on demand and kept. Compiled
programs take and give global arrays, eager replicas components; neither pays for the other.
Inside the part of a program that every replica runs, the array is the replica's own component.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from replicax import _context, cluster
from replicax._jax_compat import accept_as_array, all_gather, uncommitted
from replicax._operators import ArrayOperators
from replicax.errors import InvalidArgument, InvalidType, NotPicklable, ShapeMismatch
from replicax.topology import REPLICA_AXIS, Home, Topology

Shape = tuple[int, ...]


class DistributedValues(ABC):
    """A value with one component for each replica of a strategy.

    A leaf in every nest: `jax.tree.map` sees the whole value, not its components.
    """

    __slots__ = ("__weakref__", "_array", "_components", "_inside", "_topology")

    _topology: Topology | None
    _components: tuple[Any, ...] | None
    _array: jax.Array | None
    _inside: bool

    def __init__(self, values: Sequence[Any], topology: Topology | None = None) -> None:
        if not values:
            raise InvalidArgument(f"{type(self).__name__} needs one component a replica; got none.")
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
        """The array that stands for all of it, if that has been made."""
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
    def primary(self) -> Any:
        """The component of the first local replica."""
        return self.values[0]

    def component(self, index: int) -> Any:
        """What local replica `index` has; inside a program, what the replica itself has."""
        return self._array if self._inside else self.values[index]

    def replaced(self, index: int, component: Any) -> Self:
        """The same value with another component for local replica `index`."""
        if self._inside:
            return self._of_array(component, self._topology, True)
        values = self.values
        return type(self)((*values[:index], component, *values[index + 1 :]), self._topology)

    def own_component(self) -> Any | None:
        """Return what the replica that is running has of it; None outside of its replicas.

        For values that a function closes over: what it is given has been taken apart already.
        """
        if not self._is_captured():
            return None
        frame = _context.current()
        assert frame.replica is not None
        assert frame.strategy is not None
        if frame.program is None:
            return self.values[frame.replica.local_index]
        return self._captured(frame.strategy.topology, frame.replica.replica_id_in_sync_group)

    def _is_captured(self) -> bool:
        """Tell whether a function that closes over the value runs, as one of its replicas."""
        frame = _context.current()
        if frame.replica is None or frame.strategy is None or self._inside:
            return False
        topology = frame.strategy.topology
        if self._topology is None:
            return len(self.values) == len(topology.local_replicas)
        return self._topology == topology

    @abstractmethod
    def _captured(self, topology: Topology, replica: int | jax.Array) -> jax.Array:
        """Return what a replica has, in a program that closes over the value."""

    @abstractmethod
    def array(self, topology: Topology) -> jax.Array:
        """The global array over the mesh of `topology`."""

    # As an array, where it is one.

    @property
    def shape(self) -> Shape:
        return self.known().shape

    @property
    def dtype(self) -> np.dtype:
        return self.known().dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @abstractmethod
    def _as_array(self) -> jax.Array:
        """Return the array that the value is here; refuse to, if it is several."""

    @abstractmethod
    def known(self) -> jax.Array | jax.ShapeDtypeStruct:
        """Return what is known of that array without computing anything."""

    @classmethod
    def _of_array(cls, array: jax.Array, topology: Topology | None, inside: bool) -> Self:
        self = cls.__new__(cls)
        self._topology, self._components, self._array = topology, None, array
        self._inside = inside
        return self

    def _take_apart(self) -> tuple[jax.Array, ...]:
        """Components out of the global array: what each replica's device holds of it."""
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
                shape, home, [held[device] for device in topology.devices[replica]]
            )
            for replica, home in zip(
                topology.local_replicas, topology.divided_homes(spec), strict=True
            )
        )

    @staticmethod
    def _parts(array: jax.Array, topology: Topology) -> tuple[jax.Array, Shape, PartitionSpec]:
        """A global array, and the shape and layout of what the devices of a replica have of it."""
        spec = getattr(array.sharding, "spec", ())
        return array, array.shape, PartitionSpec(*map(_without_replicas, spec))

    def block_until_ready(self) -> Self:
        """Waits until all components are there; what `jax.block_until_ready` calls."""
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


@final
class PerReplica(DistributedValues):
    """A value that may differ from replica to replica.

    >>> import replicax as rx
    >>> rx.PerReplica((1, 2))
    PerReplica:{
      0: 1,
      1: 2
    }
    """

    __slots__ = ("_scalars", "_shapes")

    _scalars: bool
    _shapes: tuple[Shape, ...] | None

    def __init__(
        self,
        values: Sequence[Any],
        topology: Topology | None = None,
        *,
        shapes: Sequence[Shape] | None = None,
    ) -> None:
        """Of one component for each local replica; `shapes` are those of all replicas, if known."""
        super().__init__(values, topology)
        self._shapes = None if shapes is None else tuple(shapes)

    @classmethod
    def from_array(
        cls,
        array: jax.Array,
        topology: Topology,
        *,
        scalars: bool = False,
        inside: bool = False,
    ) -> PerReplica:
        """Of an array that is split over the replicas; `scalars` if each row is one component.

        `inside` a program, of the replica's own component.
        """
        self = cls._of_array(array, topology, inside)
        self._scalars = array.ndim == 0 if inside else scalars
        self._shapes = None
        return self

    @classmethod
    def stacked(cls, array: jax.Array, topology: Topology) -> PerReplica:
        """Of an array with a dimension for the replicas of all workers in front."""
        if array.ndim == 1:
            return cls.from_array(array, topology, scalars=True)
        replicas, rows, *rest = array.shape
        return cls.from_array(array.reshape(replicas * rows, *rest), topology)

    def at_home(self, topology: Topology) -> PerReplica:
        """The value as one of `topology`; one that was made by hand does not know of workers."""
        if self._topology is None and topology.spans_processes:
            return PerReplica(self.values, topology)
        return self

    def map(
        self, function: Callable[[Any], Any], new_shape: Callable[[Shape], Shape] | None = None
    ) -> PerReplica:
        """`function` of every component; `new_shape` says what it makes of their shapes."""
        topology = self._topology
        if self._inside and topology is not None:
            return PerReplica.from_array(function(self._array), topology, inside=True)
        if isinstance(self._array, Tracer) and topology is not None:
            return PerReplica.stacked(jax.vmap(function)(self._stacked(self._array)), topology)
        known = self.known_shapes()
        shapes = None if known is None or new_shape is None else [new_shape(s) for s in known]
        components = [function(component) for component in self.values]
        return PerReplica(components, topology, shapes=shapes)

    def agreed(self) -> Mirrored:
        """Return the components as one value, for replicas that are known to have the same."""
        if self._inside and self._topology is not None:
            assert self._array is not None
            return Mirrored.from_array(self._array, self._topology, inside=True)
        return Mirrored(self.values, self._topology)

    def array(self, topology: Topology) -> jax.Array:
        """The global array over `topology`: components one after another, scalars stacked.

        All components need one shape and one dtype.
        """
        if self._array is None:
            components = self.values
            if not self.uniform:
                raise ShapeMismatch(
                    "The replicas' values need equal shapes here; got "
                    f"{describe_shapes(self.shapes)}."
                )
            self._scalars = np.ndim(components[0]) == 0
            if any(isinstance(c, Tracer) for c in components):
                combine = jnp.stack if self._scalars else jnp.concatenate
                return combine([jnp.asarray(c) for c in components])
            with jax.ensure_compile_time_eval():
                rows = [jnp.reshape(c, (1,)) if self._scalars else c for c in components]
            count, *rest = np.shape(rows[0])
            self._array = _assembled(
                (count * topology.num_replicas, *rest), topology.split, rows, topology
            )
        return self._array

    @property
    def scalars(self) -> bool:
        """Whether the components have rank 0."""
        if self._array is not None or self._components is None:
            return self._scalars
        return np.ndim(self._components[0]) == 0

    @property
    def uniform(self) -> bool:
        """Whether all components have one shape."""
        return len(set(self.shapes)) == 1

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of every replica's component; asks the other workers if it is not known."""
        known = self.known_shapes()
        if known is None:
            settle_shapes([self], "comparing the shapes of per-replica values")
            known = self._shapes
            assert known is not None
        return known

    def known_shapes(self) -> tuple[Shape, ...] | None:
        """The shape of every replica's component; None if only the other workers know."""
        topology = self._topology
        if self._array is not None and topology is not None:
            return (np.shape(self.samples()[0]),) * topology.num_replicas
        if self._shapes is None and not (topology is not None and topology.spans_processes):
            return tuple(np.shape(component) for component in self.values)
        return self._shapes

    def _local_kinds(self) -> list[tuple[Shape, str]]:
        """Shape and dtype of the component of each local replica."""
        kinds = [(np.shape(sample), _kind_of(sample)) for sample in self.samples()]
        if len(kinds) == 1 and self._topology is not None:
            kinds *= len(self._topology.local_replicas)
        return kinds

    def samples(self) -> tuple[Any, ...]:
        """What dtypes can be read off: the local components, or one where all are alike."""
        if self._components is not None:
            return self._components
        assert self._array is not None
        shape = self._array.shape
        if not self._inside and self._topology is not None:
            shape = shape[1:] if self._scalars else _component_shape(shape, self._topology)
        return (jax.ShapeDtypeStruct(shape, self._array.dtype),)

    def _stacked(self, array: jax.Array) -> jax.Array:
        """The global array with a dimension for the replicas in front."""
        assert self._topology is not None
        if self._scalars:
            return array
        count = self._topology.num_replicas
        return array.reshape(count, *_component_shape(array.shape, self._topology))

    @staticmethod
    def _parts(array: jax.Array, topology: Topology) -> tuple[jax.Array, Shape, PartitionSpec]:
        first, *rest = getattr(array.sharding, "spec", ()) or (None,)
        if first != REPLICA_AXIS and REPLICA_AXIS not in (first or ()):
            # XLA may leave an array without elements so.
            array, first, rest = jax.device_put(array, topology.split), REPLICA_AXIS, []
        spec = PartitionSpec(_without_replicas(first), *rest)
        return array, _component_shape(array.shape, topology), spec

    def _take_apart(self) -> tuple[jax.Array, ...]:
        assert self._array is not None
        if self._inside:
            return tuple(all_gather(self._array, REPLICA_AXIS))
        if isinstance(self._array, Tracer):
            return tuple(self._stacked(self._array))
        parts = super()._take_apart()
        return tuple(part.reshape(()) for part in parts) if self._scalars else parts

    @property
    def __jax_array__(self) -> Callable[[], jax.Array]:
        # A property: JAX looks at it before it calls it.
        array = self._as_array()
        return lambda: array

    def _as_array(self) -> jax.Array:
        if not self.is_one_array():
            self._refuse()
        own = self.own_component()
        return self._only() if own is None else jnp.asarray(own)

    def is_one_array(self) -> bool:
        """Tell whether it is one array here: that of the replica that runs, or the only one."""
        if self._topology is not None and self._topology.num_replicas == 1:
            return True
        return self._is_captured() or (self._topology is None and len(self.values) == 1)

    def known(self) -> jax.Array | jax.ShapeDtypeStruct:
        if not self.is_one_array():
            self._refuse()
        return _known(self.samples()[0])

    def _captured(self, topology: Topology, replica: int | jax.Array) -> jax.Array:
        if topology.spans_processes or not self.uniform:
            raise InvalidType(
                "A compiled function closes over a PerReplica value "
                f"({self._describe_components()}), of which a program of several workers, or of "
                "replicas whose shapes differ, has no copy. Pass it in `args` of `strategy.run`."
            )
        with jax.ensure_compile_time_eval():
            components = np.stack([np.asarray(component) for component in self.values])
        return jnp.asarray(components)[replica]

    def _only(self) -> jax.Array:
        """Return the component, if this process has one."""
        if len(self.values) > 1:
            self._refuse()
        return jnp.asarray(self.primary)

    def _refuse(self) -> NoReturn:
        raise InvalidType(
            "A PerReplica value has one component per replica and cannot be used as one array; "
            f"got {self._describe_components()}. Combine it first with `strategy.reduce` or "
            "`strategy.gather`, take it apart with `strategy.experimental_local_results`, or use "
            "it inside `strategy.run`. To carry it through `lax.scan`, `fori_loop`, `while_loop` "
            "or `cond`, put the loop inside `run`."
        )

    def _describe_components(self) -> str:
        shapes = self.known_shapes() or tuple(np.shape(sample) for sample in self.samples())
        return f"{describe_shapes(shapes)}, dtype {_kind_of(self.samples()[0])}"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.__jax_array__(), dtype=dtype, copy=True if copy else None)

    # One number can be had where this process has one replica, also of several workers: programs
    # print their own loss so. As an array, a value of several workers is refused.

    def __float__(self) -> float:
        return float(self._only())

    def __int__(self) -> int:
        return int(self._only())

    def __complex__(self) -> complex:
        return complex(self._only())


@final
class Mirrored(ArrayOperators, DistributedValues):
    """A value that is the same on every replica, with a copy on each of their devices.

    Usable as an array: that is the copy of the first replica, or in a function given to `run` the
    copy of the replica that runs.
    """

    __slots__ = ()

    @classmethod
    def from_array(cls, array: jax.Array, topology: Topology, *, inside: bool = False) -> Mirrored:
        """Of an array that is replicated over the devices of `topology`."""
        return cls._of_array(array, topology, inside)

    def with_array(self, array: jax.Array) -> Mirrored:
        """Another value in the same place."""
        return self._of_array(array, self._topology, self._inside)

    def map(self, function: Callable[[Any], Any]) -> Mirrored:
        """`function` of the value, on every device."""
        assert self._topology is not None
        array = function(self.array(self._topology))
        return Mirrored.from_array(array, self._topology, inside=self._inside)

    def array(self, topology: Topology) -> jax.Array:
        """The global array, replicated over the devices of `topology`."""
        if self._array is None:
            if any(isinstance(c, Tracer) for c in self.values):
                return self.values[0]
            layout = topology.replicated
            first = getattr(self.values[0], "sharding", None)
            if isinstance(first, NamedSharding) and topology.is_home(first):
                layout = NamedSharding(topology.mesh, first.spec)
            self._array = _assembled(np.shape(self.values[0]), layout, self.values, topology)
        return self._array

    def _take_apart(self) -> tuple[jax.Array, ...]:
        assert self._array is not None
        assert self._topology is not None
        if self._inside or isinstance(self._array, Tracer):
            return (self._array,) * len(self._topology.local_replicas)
        return super()._take_apart()

    def numpy(self) -> np.ndarray:
        """The value as a NumPy array."""
        return np.asarray(self.primary)

    def known(self) -> jax.Array | jax.ShapeDtypeStruct:
        own = None if self._inside else self.own_component()
        return _known(self.primary if own is None else own)

    def _captured(self, topology: Topology, replica: int | jax.Array) -> jax.Array:
        # Each process closes over a copy of its own, on one device, which JAX brings to the others.
        return self.primary

    def _as_array(self) -> jax.Array:
        own = self.own_component()
        return jnp.asarray(self.primary if own is None else own)

    def __jax_array__(self) -> jax.Array:
        return self._as_array()


accept_as_array(PerReplica, PerReplica._as_array, PerReplica.known)
accept_as_array(Mirrored, Mirrored._as_array, Mirrored.known)


def is_numeric(dtype: np.dtype) -> bool:
    """Whether JAX has arrays of it; not so of strings, dates and objects."""
    return dtype.kind not in "OSUMm" and dtype.names is None


def place(value: Any, home: Home) -> jax.Array:
    """`value` as an array at `home`; the array itself when it is there already, also in parts.

    While a program is traced nothing is moved: where things are is XLA's business there.
    """
    if isinstance(value, Tracer) or _context.current().program is not None:
        return value
    if isinstance(value, jax.Array) and is_at(value, home):
        return value
    return jax.device_put(value, home)


def as_plain(array: jax.Array, topology: Topology) -> jax.Array:
    """Return the first replica's copy of a result as an array that JAX moves to where it is used.

    So it meets the arrays of every replica that closes over it.
    """
    if isinstance(array, Tracer) or topology.num_replicas == 1:
        return array
    return uncommitted(array.addressable_data(0) if array.is_fully_replicated else array)


def is_at(array: jax.Array, home: Home) -> bool:
    """Whether an array is on all devices of a replica, and only there."""
    return array.devices() == ({home} if isinstance(home, jax.Device) else home.device_set)


def _assembled(
    shape: tuple[int, ...], sharding: Any, components: Sequence[Any], topology: Topology
) -> jax.Array:
    """One array of what is on, or goes to, each replica's device; now, also while tracing."""
    with jax.ensure_compile_time_eval():
        placed = [
            component if _is_laid_out(component, home) else jax.device_put(component, home)
            for component, home in zip(components, _homes(sharding, topology), strict=True)
        ]
        if topology.logical_devices_per_replica > 1:
            placed = [shard.data for array in placed for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def _is_laid_out(value: Any, home: Home) -> bool:
    if not isinstance(value, jax.Array):
        return False
    if isinstance(home, jax.Device):
        return value.devices() == {home}
    return value.sharding.is_equivalent_to(home, value.ndim)


def _without_replicas(axes: Any) -> Any:
    """An entry of a layout, on the devices of one replica."""
    if isinstance(axes, tuple):
        return tuple(axis for axis in axes if axis != REPLICA_AXIS) or None
    return None if axes == REPLICA_AXIS else axes


def _homes(sharding: NamedSharding, topology: Topology) -> Sequence[Home]:
    """Where each local replica's part of a global array of that sharding has to be."""
    if topology.logical_devices_per_replica == 1:
        return topology.local_devices
    spec = PartitionSpec(*map(_without_replicas, sharding.spec))
    return topology.divided_homes(spec)


def _component_shape(shape: tuple[int, ...], topology: Topology) -> tuple[int, ...]:
    return (shape[0] // topology.num_replicas, *shape[1:])


def settle_shapes(values: Sequence[PerReplica], label: str) -> None:
    """Makes the shapes of per-replica values known, if workers have made them by themselves.

    Where there are several workers, they all come here before they combine values for `label`, and
    are told if they come for different things, or with different dtypes.
    """
    topology = values[0].topology if values else None
    if topology is None or not topology.spans_processes:
        return
    if _context.current().program is not None:
        return  # of which workers make sure that it is the same on all of them
    own = [value._local_kinds() for value in values]
    brought = cluster.current().meet(f"{label} of {len(values)} value(s)", own)
    for number, value in enumerate(values):
        parts = [part for worker in brought for part in worker[number]]
        dtypes = [dtype for _, dtype in parts]
        if len(set(dtypes)) > 1:
            raise InvalidType(f"`{label}` needs one dtype on all replicas; got {_each(dtypes)}.")
        shapes = tuple(tuple(shape) for shape, _ in parts)
        if value.known_shapes() not in (None, shapes):
            raise ShapeMismatch(
                f"`{label}` got values that are not the same on all workers: "
                f"{describe_shapes(shapes)}. Give all workers the result of the same computation."
            )
        value._shapes = shapes


def describe_shapes(shapes: Sequence[Shape]) -> str:
    """For messages: "replica 0: (2, 3), replica 1: (4, 3)"; of one for all, "(2, 3) on each"."""
    if len(set(shapes)) == 1:
        return f"{shapes[0]} on each replica"
    return _each(shapes)


def _known(component: Any) -> jax.Array | jax.ShapeDtypeStruct:
    if isinstance(component, (jax.Array, jax.ShapeDtypeStruct)):
        return component
    return jax.ShapeDtypeStruct(np.shape(component), jnp.result_type(component))


def _kind_of(component: Any) -> str:
    return str(getattr(component, "dtype", type(component).__name__))


def _each(things: Sequence[Any]) -> str:
    return ", ".join(f"replica {i}: {thing}" for i, thing in enumerate(things))
