"""Values that may differ from replica to replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from replicax import _context
from replicax._jax_compat import accept_as_array, all_gather, uncommitted, without_mesh
from replicax._operators import Arithmetic
from replicax._typing import Leaf, Nest
from replicax.errors import InvalidArgument, InvalidType, ShapeMismatch
from replicax.topology import REPLICA_AXIS, Topology
from replicax.values._device_put import as_plain, assembled, without_replicas
from replicax.values._distributed import DistributedValues, Shape, known_of
from replicax.values._mirrored import Mirrored
from replicax.values._padding import cut_placed, cut_traced, pad


@final
class PerReplica(Arithmetic, DistributedValues):
    """A value that may differ from replica to replica.

    >>> import replicax as rx
    >>> rx.PerReplica((1, 2))
    PerReplica:{
      0: 1,
      1: 2
    }
    """

    __slots__ = ("_common", "_padded", "_scalars", "_shapes", "_sum")

    _common: jax.Array | None
    _scalars: bool
    _shapes: tuple[Shape, ...] | None
    _padded: jax.Array | None  # only if the shapes of components differ
    _sum: jax.Array | None  # over all replicas, if the program has computed it

    def __init__(
        self,
        values: Sequence[Any],
        topology: Topology | None = None,
        *,
        shapes: Sequence[Shape] | None = None,
    ) -> None:
        """Make a value from the local components; `shapes` are those of all replicas, if known."""
        super().__init__(values, topology)
        self._common = None
        self._shapes = None if shapes is None else tuple(shapes)
        self._padded = self._sum = None

    @classmethod
    def from_array(
        cls,
        array: jax.Array,
        topology: Topology,
        *,
        scalars: bool = False,
        inside: bool = False,
    ) -> PerReplica:
        """Make a value from an array that is split over the replicas.

        With `scalars`, each row is a component. With `inside`, which is for programs, the array is
        the replica's own component.
        """
        self = cls._of_array(array, topology, inside)
        self._scalars = array.ndim == 0 if inside else scalars
        return self

    @classmethod
    def _of_array(cls, array: jax.Array, topology: Topology | None, inside: bool) -> Self:
        self = super()._of_array(array, topology, inside)
        self._scalars = array.ndim == 0
        self._common = self._shapes = self._padded = self._sum = None
        return self

    @classmethod
    def from_padded(
        cls, padded: jax.Array, topology: Topology, shapes: Sequence[Shape]
    ) -> PerReplica:
        """Make a value from an array that `padded` returned and the shapes of all components."""
        self = cls._of_array(padded, topology, False)
        self._array, self._padded = None, padded
        self._scalars, self._shapes = False, tuple(shapes)
        return self

    @classmethod
    def of_common(cls, array: jax.Array, topology: Topology) -> PerReplica:
        """Make a value from an array on every device, which is by construction equal on all.

        It can be used as that array, as well as taken apart.
        """
        self = cls.__new__(cls)
        self._topology, self._components, self._array = topology, None, None
        self._inside, self._common, self._scalars = False, array, array.ndim == 0
        self._padded = self._shapes = self._sum = None
        return self

    @property
    def common(self) -> jax.Array | None:
        """The array that all replicas are known to share, over all their devices, if any."""
        return self._common

    def note_sum(self, total: jax.Array) -> None:
        """Note the sum of the components of all replicas."""
        self._sum = total

    @property
    def known_sum(self) -> jax.Array | None:
        """The sum of the components of all replicas, if that has been computed."""
        return self._sum

    @classmethod
    def stacked(cls, array: jax.Array, topology: Topology) -> PerReplica:
        """Make a value from an array whose first dimension is the replicas of all workers."""
        if array.ndim == 1:
            return cls.from_array(array, topology, scalars=True)
        replicas, rows, *rest = array.shape
        return cls.from_array(array.reshape(replicas * rows, *rest), topology)

    def of_topology(self, topology: Topology) -> PerReplica:
        """Return the value as one of `topology`; one made by hand knows nothing of workers."""
        if self._topology is None and topology.spans_processes:
            return PerReplica(self.values, topology)
        return self

    def map(
        self, function: Callable[[Any], Nest], new_shape: Callable[[Shape], Shape] | None = None
    ) -> PerReplica:
        """Apply `function` to every component; `new_shape` gives the shapes of the results."""
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
        """Return the value as a mirrored one; its components must be known to be equal."""
        if self._inside and self._topology is not None:
            assert self._array is not None
            return Mirrored.from_array(self._array, self._topology, inside=True)
        return Mirrored(self.values, self._topology)

    def array(self, topology: Topology) -> jax.Array:
        """Return the global array over `topology`: components concatenated, scalars stacked.

        All components must have the same shape and dtype.
        """
        if isinstance(self._common, Tracer):
            # The array is for the replicas of all workers, of which this process has only some.
            combine = jnp.stack if self._scalars else jnp.concatenate
            return combine([self._common] * topology.num_replicas)
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
            self._array = assembled(
                (count * topology.num_replicas, *rest), topology.split, rows, topology
            )
        return self._array

    def padded(self, topology: Topology) -> jax.Array:
        """Return the global array of components of different shapes, padded with zeros.

        Each is padded to the largest size in every dimension.
        """
        if self._padded is None:
            padded = pad(self.values, self.shapes, topology)
            if isinstance(padded, Tracer):
                return padded
            self._padded = padded
        return self._padded

    @property
    def traced(self) -> bool:
        """True if it was made in the program that is being traced."""
        parts = (self._array, self._padded, *(self._components or ())[:1])
        return any(isinstance(part, Tracer) for part in parts)

    @property
    def scalars(self) -> bool:
        """True if the components have rank 0."""
        if self._array is not None or self._components is None:
            return self._scalars
        return np.ndim(self._components[0]) == 0

    @property
    def is_assembled(self) -> bool:
        """True if its components are one array, or all the same array."""
        return self._array is not None or self._common is not None

    @property
    def uniform(self) -> bool:
        """True if all components have one shape."""
        return self.is_assembled or len(set(self.shapes)) == 1

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shape of every replica's component, on which its workers must have agreed."""
        known = self.known_shapes()
        if known is None:
            raise InvalidArgument(
                "Each worker has made its own part of a PerReplica value, and does not know the "
                f"shapes of the others; this one has {self._describe_components()}. Combine it "
                "with `strategy.reduce` or `strategy.gather`, or pass it as an argument of the "
                "`rx.function` that uses it: there the workers compare their shapes."
            )
        return known

    def known_shapes(self) -> tuple[Shape, ...] | None:
        """Return the shape of every replica's component, or None if other workers' are unknown."""
        topology = self._topology
        if topology is not None and self.is_assembled:
            return (np.shape(self.samples()[0]),) * topology.num_replicas
        if self._shapes is None and not _is_shared(topology):
            return tuple(np.shape(component) for component in self.values)
        return self._shapes

    @property
    def has_known_shapes(self) -> bool:
        """True if `shapes` is known: it is not if several workers have just computed the value."""
        return self._shapes is not None or self.is_assembled or not _is_shared(self._topology)

    def learn_shapes(self, shapes: Sequence[Shape]) -> None:
        """Record the shapes of all replicas' components, on which the workers have agreed."""
        self._shapes = tuple(shapes)

    def replaced(self, index: int, component: object) -> PerReplica:
        value = super().replaced(index, component)
        if not self._inside and _is_shared(self._topology):
            value._shapes = self.known_shapes()
        return value

    def local_kinds(self) -> list[tuple[Shape, str]]:
        """Return the shape and the dtype of each local replica's component."""
        kinds = [(np.shape(sample), _kind_of(sample)) for sample in self.samples()]
        if len(kinds) == 1 and self._topology is not None:
            kinds *= len(self._topology.local_replicas)
        return kinds

    def samples(self) -> tuple[Any, ...]:
        """Return samples that show the dtypes: the local components, or one if all are alike."""
        if self._components is not None:
            return self._components
        if self._common is not None:
            return (jax.ShapeDtypeStruct(self._common.shape, self._common.dtype),)
        if self._array is None:
            padded, shapes, topology = self._uneven()
            return tuple(
                jax.ShapeDtypeStruct(shapes[replica], padded.dtype)
                for replica in topology.local_replicas
            )
        shape = self._array.shape
        if not self._inside and self._topology is not None:
            shape = shape[1:] if self._scalars else _component_shape(shape, self._topology)
        return (jax.ShapeDtypeStruct(shape, self._array.dtype),)

    def _uneven(self) -> tuple[jax.Array, tuple[Shape, ...], Topology]:
        """Return the padded array, the shapes and the topology of a value of uneven shapes."""
        assert self._padded is not None
        assert self._shapes is not None
        assert self._topology is not None
        return self._padded, self._shapes, self._topology

    def _stacked(self, array: jax.Array) -> jax.Array:
        """Return the global array with the replicas as a first dimension of their own."""
        assert self._topology is not None
        if self._scalars:
            return array
        count = self._topology.num_replicas
        return array.reshape(count, *_component_shape(array.shape, self._topology))

    @staticmethod
    def _parts(array: jax.Array, topology: Topology) -> tuple[jax.Array, Shape, PartitionSpec]:
        first, *rest = getattr(array.sharding, "spec", ()) or (None,)
        if first != REPLICA_AXIS and REPLICA_AXIS not in (first or ()):
            # XLA may lay out an array without elements like this.
            array, first, rest = jax.device_put(array, topology.split), REPLICA_AXIS, []
        spec = PartitionSpec(without_replicas(first), *rest)
        return array, _component_shape(array.shape, topology), spec

    @without_mesh
    def _take_apart(self) -> tuple[jax.Array, ...]:
        if self._common is not None:
            assert self._topology is not None
            return Mirrored.from_array(self._common, self._topology).values
        if self._array is None:
            return self._cut()
        if self._inside:
            return tuple(all_gather(self._array, REPLICA_AXIS))
        if isinstance(self._array, Tracer):
            return tuple(self._stacked(self._array))
        parts = super()._take_apart()
        return tuple(part.reshape(()) for part in parts) if self._scalars else parts

    def _cut(self) -> tuple[jax.Array, ...]:
        """Return the components of the padded array."""
        padded, shapes, topology = self._uneven()
        if not isinstance(padded, Tracer):
            return cut_placed(PerReplica.from_array(padded, topology).values, shapes, topology)
        if topology.spans_processes:
            raise InvalidArgument(
                "A compiled function of several workers takes apart a PerReplica value whose "
                f"shapes differ ({describe_shapes(shapes)}). Use it in `strategy.run` only."
            )
        return cut_traced(padded, shapes)

    @property
    def __jax_array__(  # pyright: ignore[reportIncompatibleMethodOverride]  callable nevertheless
        self,
    ) -> Callable[[], jax.Array]:
        # This is a property because JAX looks the attribute up before it calls it.
        array = self._as_array()
        return lambda: array

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the array, if the value is one: `loss.item()`, `leaf.real`."""
        if name in _KNOWN_OF_ARRAYS:  # a property has raised, so Python falls back to this
            return self._attribute(name)
        if name not in _OF_ARRAYS:
            raise AttributeError(f"'PerReplica' object has no attribute {name!r}")
        return self._attribute_of(self._as_array, name)

    def _as_array(self) -> jax.Array:
        if not self.is_one_array():
            self._refuse()
        own = self.own_component()
        return self._only() if own is None else jnp.asarray(own)

    def is_one_array(self) -> bool:
        """Tell whether it is one array here: that of the running replica, or the only one."""
        if self._common is not None:
            return True
        if self._topology is not None and self._topology.num_replicas == 1:
            return True
        return self._is_captured() or (self._topology is None and len(self.values) == 1)

    def known(self) -> jax.Array | jax.ShapeDtypeStruct:
        if not self.is_one_array():
            self._refuse()
        # In a program, values that replicas close over have one shape, and taking a component would
        # compute something.
        own = self.own_component() if _context.current().program is None else None
        return known_of(self.samples()[0] if own is None else own)

    def component(self, index: int) -> Leaf:
        program = _context.current().program
        if self._inside or program is None or not program.inside:
            return super().component(index)
        if self._common is not None:
            assert self._topology is not None
            return as_plain(self._common, self._topology)
        if self._components is not None and isinstance(self._components[0], Tracer):
            return super().component(index)  # made in the program, for the only replica
        return self._component_in_program()

    def _component_in_program(self) -> jax.Array:
        """Return a replica's component, in the part of a program that all replicas run.

        The value is not an argument of that part: it existed before, and the code closes over it.
        """
        replica = jax.lax.axis_index(REPLICA_AXIS)
        if isinstance(self._array, Tracer):  # It belongs to the outer level.
            return self._stacked(self._array)[replica]
        spans_processes = self._topology is not None and self._topology.spans_processes
        if spans_processes or not self.uniform:
            # This is not a `TypeError`, whose message JAX would replace with one of its own.
            raise InvalidArgument(
                "A compiled function closes over a PerReplica value "
                f"({self._describe_components()}), of which a program of several workers, or of "
                "replicas whose shapes differ, has no copy. Pass it in `args` of `strategy.run`."
            )
        with jax.ensure_compile_time_eval():
            # It goes to one device, from which JAX brings it to the others.
            first = next(iter(jnp.asarray(self.primary).devices()))
            components = jnp.stack([jax.device_put(each, first) for each in self.values])
        return uncommitted(components)[replica]

    def _only(self) -> jax.Array:
        """Return the component, if this process has only one or all are the same."""
        if self._common is not None:
            assert self._topology is not None
            return as_plain(self._common, self._topology)
        if len(self.values) > 1:
            self._refuse()
        return jnp.asarray(self.primary)

    def _refuse(self) -> NoReturn:
        raise InvalidType(
            "A PerReplica value has one component per replica and cannot be used as one array; "
            f"got {self._describe_components()}. Combine it first with `strategy.reduce` or "
            "`strategy.gather`, take it apart with `strategy.experimental_local_results`, or use "
            "it inside `strategy.run`; if all replicas have the same, take one: `rx.first(nest)`. "
            "To carry it through `lax.scan`, `fori_loop`, `while_loop` or `cond`, put the loop "
            "inside `run`."
        )

    def _describe_components(self) -> str:
        shapes = self.known_shapes() or tuple(np.shape(sample) for sample in self.samples())
        return f"{describe_shapes(shapes)}, dtype {_kind_of(self.samples()[0])}"

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.__jax_array__(), dtype=dtype, copy=True if copy else None)

    # Conversion to a number is allowed if this process has one replica, even with several workers:
    # programs print their own loss this way. As an array, a value of several workers is refused.

    def __float__(self) -> float:
        return float(self._only())

    def __int__(self) -> int:
        return int(self._only())

    def __complex__(self) -> complex:
        return complex(self._only())


_KNOWN_OF_ARRAYS = ("shape", "dtype", "ndim", "size")
# The attributes of arrays that programs use, in addition to functions of `jax.numpy`.
_OF_ARRAYS = frozenset(
    {
        *("T", "all", "any", "argmax", "argmin", "astype", "at", "flatten", "imag", "item", "max"),
        *("mean", "min", "nbytes", "prod", "ravel", "real", "reshape", "round", "squeeze", "std"),
        *("sum", "tolist", "transpose", "var"),
    }
)

accept_as_array(PerReplica, PerReplica._as_array, PerReplica.known)


def _is_shared(topology: Topology | None) -> bool:
    """Tell whether other workers have components of a value of this topology."""
    return topology is not None and topology.spans_processes


def _component_shape(shape: tuple[int, ...], topology: Topology) -> tuple[int, ...]:
    return (shape[0] // topology.num_replicas, *shape[1:])


def describe_shapes(shapes: Sequence[Shape]) -> str:
    """Describe shapes: "replica 0: (2, 3), replica 1: (4, 3)", or "(2, 3) on each"."""
    if len(set(shapes)) == 1:
        return f"{shapes[0]} on each replica"
    return describe_each(shapes)


def _kind_of(component: object) -> str:
    return str(getattr(component, "dtype", type(component).__name__))


def describe_each(things: Sequence[object]) -> str:
    """Describe one object per replica for a message: "replica 0: ..."."""
    return ", ".join(f"replica {i}: {thing}" for i, thing in enumerate(things))
