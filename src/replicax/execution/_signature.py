"""For which arguments a compiled program is good."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import jax
import numpy as np

from replicax import _bridges, _nest
from replicax._context import Frame
from replicax._describing import described
from replicax._typing import Nest
from replicax.errors import InvalidType
from replicax.input import DistributedIterator
from replicax.topology import Topology
from replicax.values import Mirrored, PerReplica, is_numeric
from replicax.variables import Variable

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


# What a traced program depends on besides its arguments; the rest of JAX's settings it is good for.
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision")


def signature_of(
    strategy: StrategyLike | None,
    frame: Frame,
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    memory: dict[Any, Any],
) -> tuple[Signature | None, list[Any]]:
    """The signature of a call, and the arrays in its arguments.

    None for per-replica values whose shapes differ, or which are no arrays: no program is good for
    them. With a `strategy`, of a call by its `run`. `memory` is kept from call to call of `fn`.
    """
    leaves, structure = _nest.flatten((args, kwargs), handed=True)
    described = describe(leaves, getattr(strategy or frame.strategy, "topology", None))
    if described is None:
        return None, []
    keys, arrays, fills = described
    settings = tuple(getattr(jax.config, name) for name in _SETTINGS)
    others = _bridges.fingerprint(fn, leaves, memory)
    key = (strategy, frame.strategy, frame.kind, settings, structure, others, tuple(keys))
    return Signature(key, frame, strategy, leaves, structure, fills), arrays


def describe(
    leaves: Sequence[Any], topology: Topology | None
) -> tuple[list[Any], list[Any], list[Any]] | None:
    """What a program has to know of values: a key for each, the arrays, and how to dress these.

    None if a program cannot take them. `topology` is that of values which do not say.
    """
    keys: list[Any] = []
    arrays: list[Any] = []
    fills: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
            keys.append((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)))
            arrays.append(leaf)
            fills.append(_itself)
        elif isinstance(leaf, (PerReplica, Mirrored)):
            home = leaf.topology or topology
            if home is not None and isinstance(leaf, PerReplica):
                leaf = leaf.at_home(home)
            if home is None or not _is_array(leaf):
                return None
            array = leaf.array(home)
            scalars = isinstance(leaf, PerReplica) and leaf.scalars
            keys.append((array.shape, array.dtype, type(leaf), home, scalars))
            arrays.append(array)
            fills.append(functools.partial(_distributed, type(leaf), home, scalars))
        elif isinstance(leaf, (np.ndarray, np.generic)):
            if not is_numeric(leaf.dtype):
                return None
            keys.append((leaf.shape, leaf.dtype))
            arrays.append(leaf)
            fills.append(_itself)
        elif isinstance(leaf, DistributedIterator):
            # Every epoch has a new one. What matters is which of the arguments are the same.
            keys.append(_IteratorKey(next(i for i, other in enumerate(leaves) if other is leaf)))
            fills.append(None)
        elif _nest.is_handed_whole(leaf):
            keys.append(_OBJECT)  # which one, and what it is like, is in the bridge's fingerprint
            fills.append(None)
        else:
            keys.append(_static_key(leaf))
            fills.append(None)
    return keys, arrays, fills


def dressed(leaves: Sequence[Any], fills: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """The leaves that `describe` was given, with these arrays in the places of theirs."""
    remaining = iter(arrays)
    return [
        leaf if fill is None else fill(next(remaining))
        for leaf, fill in zip(leaves, fills, strict=True)
    ]


def _is_array(value: PerReplica | Mirrored) -> bool:
    """Whether components can form one global array."""
    if isinstance(value, Mirrored):
        return True
    sample = value.samples()[0]
    if isinstance(sample, np.ndarray):
        return value.uniform and is_numeric(sample.dtype)
    return value.uniform and (hasattr(sample, "dtype") or isinstance(sample, (int, float, complex)))


@final
class Signature:
    """For which arguments a program is good; while it is made, also the arguments themselves."""

    __slots__ = ("_fill", "_hash", "_key", "_leaves", "_strategy", "_structure", "frame")

    def __init__(
        self, key: Any, frame: Any, strategy: Any, leaves: Any, structure: Any, fill: Any
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
    def leaves(self) -> Sequence[Any]:
        """The leaves of the arguments, until they are forgotten."""
        return self._leaves

    def bind(self, python_function: Callable[..., Any]) -> Callable[[list[Any]], Nest]:
        """The function of the arrays alone."""
        leaves, fills, structure, strategy = (
            self._leaves,
            self._fill,
            self._structure,
            self._strategy,
        )

        def function(arrays: list[Any]) -> Nest:
            args, kwargs = jax.tree.unflatten(structure, dressed(leaves, fills, arrays))
            if strategy is None:
                return _bridges.surrounded(python_function)(*args, **kwargs)
            return strategy.run(python_function, args, kwargs)

        return function

    def plain_arrays(self) -> list[int]:
        """Which of the arrays are `jax.Array`s by themselves, and not part of something."""
        dynamic = [
            (leaf, fill)
            for leaf, fill in zip(self._leaves, self._fill, strict=True)
            if fill is not None
        ]
        return [
            index
            for index, (leaf, fill) in enumerate(dynamic)
            if fill is _itself and isinstance(leaf, jax.Array)
        ]

    def forget_values(self) -> None:
        """Lets go of the arguments: a program kept for long must not keep a batch alive."""
        self._leaves = self._fill = self.frame = None

    def difference(self, other: Signature) -> str:
        """Where two signatures differ, in words."""
        names = (
            "the strategy",
            "the scope",
            "the context",
            "a setting of JAX",
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
    return f"{dtype}{list(shape)}"


def _itself(array: Any) -> Any:
    return array


def _distributed(
    kind: type[PerReplica] | type[Mirrored], topology: Topology, scalars: bool, array: Any
) -> PerReplica | Mirrored:
    if kind is PerReplica:
        return PerReplica.from_array(array, topology, scalars=scalars)
    return Mirrored.from_array(array, topology)


_OBJECT = "an object of another library"


@dataclass(frozen=True, slots=True)
class _IteratorKey:
    """An iterator among the arguments, by where it first stands."""

    place: int

    def __repr__(self) -> str:
        return "a distributed iterator"


class _Static:
    """A Python value that a program was made for: compared by value, or else by identity."""

    __slots__ = ("_by_identity", "_hash", "_value")

    def __init__(self, value: Any) -> None:
        plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
        self._by_identity = not plain and (
            isinstance(value, Variable) or type(value).__eq__ is object.__eq__
        )
        if self._by_identity:
            self._hash = id(value)
            self._value: Any = _reference(value)
        else:
            self._hash = hash((type(value), value))
            self._value = value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static) or self._by_identity != other._by_identity:
            return False
        mine, yours = self._value, other._value
        if self._by_identity:
            mine, yours = mine(), yours()
            return mine is yours and mine is not None
        return type(mine) is type(yours) and mine == yours

    def __repr__(self) -> str:
        return repr(self._value() if self._by_identity else self._value)


def _reference(value: Any) -> Callable[[], Any]:
    """A weak reference where the type allows it, so that programs keep no object alive."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _static_key(leaf: Any) -> _Static:
    try:
        return _Static(leaf)
    except TypeError:
        raise InvalidType(
            "An `rx.function` got an argument that is neither an array nor hashable: "
            f"{described(leaf)} of type {type(leaf).__name__}. Register the type as a pytree, or "
            "pass arrays."
        ) from None
