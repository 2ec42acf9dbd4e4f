"""Signatures: the arguments that a compiled program is valid for."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.tree_util import PyTreeDef

from replicax import _bridges, _context, _nest
from replicax._bridges import Memory
from replicax._context import Frame
from replicax._describing import described
from replicax._typing import Leaf, Nest
from replicax.collectives import agree_on_unknown_shapes
from replicax.errors import InvalidType
from replicax.execution._executor import run_by_executor
from replicax.execution._gradient_reduction import reductions_in_force
from replicax.input import DistributedIterator
from replicax.topology import Topology
from replicax.values import Mirrored, PerReplica, Shape, is_numeric
from replicax.variables import Variable

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


# A traced program depends on these in addition to its arguments; other JAX settings may change.
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision")


def signature_of(
    strategy: StrategyLike | None,
    frame: Frame,
    fn: Callable[..., object],
    args: object,
    kwargs: object,
    memory: Memory,
) -> tuple[Signature | None, list[object]]:
    """Return the signature of a call, and the arrays in its arguments.

    The signature is None for per-replica values that are not arrays, or whose ranks differ: no
    program can take them. `strategy` is the one whose `run` is called, if any. `memory` is kept
    between calls of `fn`.
    """
    leaves, structure = _nest.flatten((args, kwargs), keep_opaque=True)
    described = describe(leaves, getattr(strategy or frame.strategy, "topology", None))
    if described is None:
        return None, []
    keys, arrays, fills = described
    settings = tuple(getattr(jax.config, name) for name in _SETTINGS)
    others = _bridges.fingerprint(fn, leaves, memory)
    reductions = reductions_in_force()
    key = (strategy, frame.strategy, frame.kind, settings, reductions)
    key = (*key, structure, others, tuple(keys))
    return Signature(key, frame, strategy, leaves, structure, fills), arrays


def describe(
    leaves: Sequence[Leaf], topology: Topology | None
) -> tuple[list[Any], list[Any], list[Any]] | None:
    """Return the keys of values, their arrays, and the functions that rebuild them.

    The result is None if a program cannot take them. Values without a topology get `topology`.
    """
    keys: list[Any] = []
    arrays: list[Any] = []
    fills: list[Any] = []
    for leaf in leaves:
        # This case comes first, because every parameter passes through it in every step.
        if leaf.__class__ is PerReplica and (common := leaf.common) is not None:
            # Its key is that of a plain array, which every replica gets whole. So a program that
            # takes parameters remains valid when they are its own results.
            weak = getattr(common, "weak_type", False)  # Random keys have none.
            keys.append((common.shape, common.dtype, weak))
            arrays.append(common)
            fills.append(_Common(leaf.topology))
        elif isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
            leaf = _over_auto_axes(leaf)
            key = (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False))
            sharding = _divided(leaf)
            keys.append(key if sharding is None else (*key, sharding))
            arrays.append(leaf)
            fills.append(_itself if sharding is None else _LaidOut(sharding))
        elif isinstance(leaf, (PerReplica, Mirrored)):
            own = leaf.topology or topology
            if own is not None and isinstance(leaf, PerReplica):
                leaf = leaf.of_topology(own)
                if not leaf.has_known_shapes:
                    agree_on_unknown_shapes([leaf])
            if own is None or not _is_array(leaf):
                return None
            if isinstance(leaf, PerReplica) and not leaf.uniform:
                array, shapes = leaf.padded(own), leaf.shapes
                keys.append((array.shape, array.dtype, own, _Uneven(shapes)))
                arrays.append(array)
                fills.append(functools.partial(_padded, own, shapes))
                continue
            array = leaf.array(own)
            scalars = isinstance(leaf, PerReplica) and leaf.scalars
            keys.append((array.shape, array.dtype, type(leaf), own, scalars))
            arrays.append(array)
            fills.append(functools.partial(_distributed, type(leaf), own, scalars))
        elif isinstance(leaf, (np.ndarray, np.generic)):
            if not is_numeric(leaf.dtype):
                return None
            keys.append((leaf.shape, leaf.dtype))
            arrays.append(leaf)
            fills.append(_itself)
        elif isinstance(leaf, DistributedIterator):
            # Every epoch has a new iterator. All that matters is which arguments are the same one.
            keys.append(_IteratorKey(next(i for i, other in enumerate(leaves) if other is leaf)))
            fills.append(None)
        elif _nest.is_opaque(leaf):
            keys.append(_OBJECT)  # The bridge's fingerprint identifies it and its structure.
            fills.append(None)
        else:
            keys.append(_static_key(leaf))
            fills.append(None)
    return keys, arrays, fills


def dressed(leaves: Sequence[Leaf], fills: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Return the leaves that `describe` was given, with `arrays` in place of their own."""
    remaining = iter(arrays)
    return [
        leaf if fill is None else fill(next(remaining))
        for leaf, fill in zip(leaves, fills, strict=True)
    ]


def are_uneven(keys: Sequence[object]) -> bool:
    """Tell whether one of the keys is that of components whose shapes differ."""
    return any(isinstance(key, tuple) and isinstance(key[-1], _Uneven) for key in keys)


def _is_array(value: PerReplica | Mirrored) -> bool:
    """Tell whether components can form one global array, padded with zeros if sizes differ."""
    if isinstance(value, Mirrored) or value.is_assembled:
        return True
    samples = value.samples()
    if not value.uniform:
        return is_paddable(value.shapes, [getattr(sample, "dtype", None) for sample in samples])
    sample = samples[0]
    if isinstance(sample, np.ndarray):
        return is_numeric(sample.dtype)
    return hasattr(sample, "dtype") or isinstance(sample, (int, float, complex))


def is_paddable(shapes: Sequence[Shape], dtypes: Sequence[object]) -> bool:
    """Tell whether arrays share one rank and one dtype, which has zeros."""
    return (
        len({len(shape) for shape in shapes}) == 1
        and len(set(dtypes)) == 1
        and isinstance(dtypes[0], np.dtype)  # and not the dtype of random keys
        and is_numeric(dtypes[0])
    )


@final
class Signature:
    """A key for the arguments a program is valid for; while it is made, also those arguments."""

    __slots__ = ("_fill", "_hash", "_key", "_leaves", "_strategy", "_structure", "frame")

    def __init__(
        self, key: Any, frame: Any, strategy: Any, leaves: Any, structure: PyTreeDef, fill: Any
    ) -> None:
        self._key = key
        self._hash = hash(key)
        self.frame: Any = frame
        self._strategy = strategy
        self._leaves: Any = leaves
        self._structure = structure
        self._fill: Any = fill

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Signature) and self._key == other._key

    @property
    def uneven(self) -> bool:
        """True if the shapes of the replicas differ."""
        return are_uneven(self._key[-1])

    @property
    def leaves(self) -> Sequence[Leaf]:
        """The leaves of the arguments, until `forget_values` drops them."""
        return self._leaves

    def bind(self, python_function: Callable[..., Nest]) -> Callable[[list[Any]], Nest]:
        """Return the call as a function of its arrays alone."""
        leaves, fills, structure, strategy = (
            self._leaves,
            self._fill,
            self._structure,
            self._strategy,
        )

        def function(arrays: list[jax.Array]) -> Nest:
            args, kwargs = jax.tree.unflatten(structure, dressed(leaves, fills, arrays))
            if strategy is None:
                return _bridges.surrounded(python_function)(*args, **kwargs)
            return run_by_executor(strategy, python_function, args, kwargs)

        return function

    def plain_arrays(self) -> list[int]:
        """Return the indices of the arrays that were passed as whole `jax.Array`s, not in parts."""
        dynamic = [
            (leaf, fill)
            for leaf, fill in zip(self._leaves, self._fill, strict=True)
            if fill is not None
        ]
        return [
            index
            for index, (leaf, fill) in enumerate(dynamic)
            if isinstance(fill, (_LaidOut, _Common))
            or (fill is _itself and isinstance(leaf, jax.Array))
        ]

    def forget_values(self) -> None:
        """Drop the arguments: a long-lived program must not keep a batch alive."""
        self._leaves = self._fill = self.frame = None

    def difference(self, other: Signature) -> str:
        """Describe in words where two signatures differ."""
        names = (
            "the strategy",
            "the scope",
            "the context",
            "a setting of JAX",
            "the reduction of gradients",
            "the structure of the arguments",
            "what objects of other libraries are like",
        )
        for name, mine, yours in zip(names, self._key, other._key, strict=False):
            if mine != yours:
                return f"{name} changed from {mine} to {yours}"
        paths = jax.tree_util.tree_flatten_with_path(
            jax.tree.unflatten(self._structure, list(range(len(self._key[-1]))))
        )[0]
        for (path, index), mine, yours in zip(paths, self._key[-1], other._key[-1], strict=True):
            if mine != yours:
                return (
                    f"argument {_argument_name(path, index)} changed from {_words(mine)} to "
                    f"{_words(yours)}"
                )
        return "nothing that shows changed"


def _argument_name(path: Any, index: int) -> str:
    _, *inner = path
    return jax.tree_util.keystr(tuple(inner)) or str(index)


def _words(key: Any) -> str:
    if isinstance(key, (_Static, _IteratorKey)) or key is _OBJECT:
        return repr(key)
    shape, dtype, *_ = key
    if isinstance(key[-1], _Uneven):
        return f"{dtype} of shapes {list(map(list, key[-1].shapes))}"
    return f"{dtype}{list(shape)}"


def _itself(array: object) -> Any:
    return array


def _over_auto_axes(leaf: object) -> Leaf:
    """Return an array of an explicit mesh as one of a mesh with automatic axes.

    Explicit axes would be part of the array's type, and the program has a mesh of its own.
    """
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.are_all_axes_auto:
        return leaf
    mesh = sharding.mesh
    types = (AxisType.Auto,) * len(mesh.axis_names)
    assert mesh.devices is not None
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return jax.device_put(leaf, NamedSharding(auto, sharding.spec))


def _divided(leaf: object) -> Leaf:
    """Return the sharding that divides an array over several devices, or None if none does."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
        return None
    sharding = leaf.sharding
    return None if sharding.num_devices == 1 or leaf.is_fully_replicated else sharding


@dataclass(frozen=True, slots=True)
class _LaidOut:
    """An array that is divided over devices, which a program can tell only from its sharding."""

    sharding: Any

    def __call__(self, array: jax.Array) -> Any:
        program = _context.current().program
        if program is not None:
            program.note_layout(array, self.sharding)
        return array


@final
class _Common:
    """A per-replica value that is known to be the same on all replicas."""

    __slots__ = ("topology",)

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    def __call__(self, array: jax.Array) -> PerReplica:
        return PerReplica.of_common(array, self.topology)


def _distributed(
    kind: type[PerReplica] | type[Mirrored], topology: Topology, scalars: bool, array: jax.Array
) -> PerReplica | Mirrored:
    if kind is PerReplica:
        return PerReplica.from_array(array, topology, scalars=scalars)
    return Mirrored.from_array(array, topology)


def _padded(topology: Topology, shapes: tuple[Shape, ...], array: jax.Array) -> PerReplica:
    return PerReplica.from_padded(array, topology, shapes)


_OBJECT = "an object of another library"


@dataclass(frozen=True, slots=True)
class _Uneven:
    """The shapes of all replicas' components, where they differ."""

    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class _IteratorKey:
    """An iterator among the arguments, identified by its first position."""

    place: int

    def __repr__(self) -> str:
        return "a distributed iterator"


class _Static:
    """A Python value that a program was made for: compared by value if possible, or by identity."""

    __slots__ = ("_by_identity", "_compared", "_hash", "_value")

    def __init__(self, value: Any) -> None:
        plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
        self._by_identity = not plain and (
            isinstance(value, Variable) or type(value).__eq__ is object.__eq__
        )
        if self._by_identity:
            self._hash = id(value)
            self._value: Any = _reference(value)
        else:
            # By its `repr`, 0.0 is not -0.0, and NaN is NaN.
            number = isinstance(value, (float, complex))
            self._compared = (type(value), repr(value) if number else value)
            self._hash = hash(self._compared)
            self._value = value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static) or self._by_identity != other._by_identity:
            return False
        if self._by_identity:
            mine, yours = self._value(), other._value()
            return mine is yours and mine is not None
        return self._compared == other._compared

    def __repr__(self) -> str:
        return repr(self._value() if self._by_identity else self._value)


def _reference(value: object) -> Callable[[], object]:
    """Make a weak reference where the type allows it, so that programs keep no object alive."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _static_key(leaf: object) -> _Static:
    try:
        return _Static(leaf)
    except TypeError:
        raise InvalidType(
            "An `rx.function` got an argument that is neither an array nor hashable: "
            f"{described(leaf)} of type {type(leaf).__name__}. Register the type as a pytree, or "
            "pass arrays."
        ) from None
