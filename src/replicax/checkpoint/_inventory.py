"""The inventory of a checkpoint: the entries of its objects, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _context
from replicax._containers import opened, record_fields
from replicax._typing import Json, Leaf, Nest
from replicax.checkpoint._entries import (
    ArrayEntry,
    Deferred,
    Entry,
    ObjectEntries,
    PositionEntry,
    TypeHandler,
    ValueEntry,
    handler_of,
    joined,
    register,
)
from replicax.checkpoint._manifest import ArrayFacts, dtype_name
from replicax.errors import InvalidArgument, InvalidType
from replicax.input import DistributedIterator
from replicax.variables import (
    Variable,
    own_part,
    store_own_part,
    store_whole_array,
    worker_parts,
)

if TYPE_CHECKING:
    from jax.tree_util import KeyPath


# The types of NumPy and JAX that TensorStore can write.
_DTYPES = frozenset(
    ["bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    + ["int2", "int4", "float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn"]
    + ["float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]
)
# Python refuses to print and parse integers of more than 4,300 digits.
_MOST_BITS = 10_000


@runtime_checkable
class _Resumable(Protocol):
    """An object that can save and restore its position, such as an iterator of Grain."""

    def get_state(self) -> Json: ...

    def set_state(self, state: Json) -> None: ...


@final
class Inventory:
    """The entries of some objects.

    Args:
      objects: The objects, by name. Numbers and arrays among them are replaced when new values are
        written.
      only: The only object whose entries are listed, under the same names as among all objects;
        None to list all of them.
    """

    def __init__(self, objects: MutableMapping[str, Any], only: str | None = None) -> None:
        self._objects = objects
        self._only = only
        self.arrays: dict[str, ArrayEntry] = {}
        self.values: dict[str, ValueEntry] = {}
        self.positions: dict[str, PositionEntry] = {}
        self.deferred: dict[str, Any] = {}
        self._incomplete: dict[str, ObjectEntries] = {}
        self.names: dict[Variable, str] = {}
        self._nests = [_Nest(objects, name) for name in objects]
        leaves = [leaf for nest in self._nests for leaf in nest.leaves()]
        # Objects that name their entries after variables come last, when all variables have names.
        leaves.sort(key=lambda leaf: leaf[1].names_variables)
        for key, handler, thing in leaves:
            self._add(key, handler.list_entries(thing, self._name_of))

    def _add(self, key: str, taken: ObjectEntries) -> None:
        if self._only is not None and key != self._only and not _under(self._only, [key]):
            for name, entry in taken.entries.items():
                self._note_name(joined(key, name), entry)
            return
        for name, entry in taken.entries.items():
            self._add_entry(joined(key, name), entry)
        self.deferred |= {joined(key, name): value for name, value in taken.deferred.items()}
        if taken.defer is not None or taken.make is not None:
            self._incomplete[key] = taken

    def _add_entry(self, key: str, entry: Entry) -> None:
        if key in self.arrays or key in self.values or key in self.positions:
            raise InvalidArgument(
                f"Two entries of the checkpoint are called {key!r}. Give one of them another name, "
                "or another place in its nest."
            )
        match entry:
            case ArrayEntry():
                _require_known(key, entry.dtype)
                self.arrays[key] = entry
                self._note_name(key, entry)
            case ValueEntry():
                self.values[key] = entry
            case PositionEntry():
                self.positions[key] = entry

    def _note_name(self, key: str, entry: Entry) -> None:
        if isinstance(entry, ArrayEntry) and entry.variable is not None:
            self.names.setdefault(entry.variable, key)

    def _name_of(self, variable: Variable) -> str | None:
        return self.names.get(variable)

    def completed_for(self, arrays: Mapping[str, ArrayFacts]) -> Inventory:
        """Return the inventory after objects have made the entries that a checkpoint holds."""
        made = False
        for place, taken in self._incomplete.items():
            new = [key for key in _under(place, arrays) if key not in self.arrays]
            if taken.make is not None and not all(arrays[key].optional for key in new):
                taken.make(place)
                made = True
        return Inventory(self._objects, self._only) if made else self

    def waits_for(self, key: str) -> bool:
        """Return whether an object can hold a saved value for `key` until it creates that entry."""
        return any(
            taken.defer is not None and _under(place, [key])
            for place, taken in self._incomplete.items()
        )

    def defer(
        self, values: Mapping[str, jax.Array | np.ndarray], saved: Iterable[str]
    ) -> list[Deferred]:
        """Give objects the saved values of entries that they do not have yet.

        An object that is among the `saved`, but without such entries, gets an empty set, which
        replaces any values that it has from another checkpoint.
        """
        all_deferred = []
        for place, taken in self._incomplete.items():
            own = {key.removeprefix(f"{place}/"): values[key] for key in _under(place, values)}
            if taken.defer is not None and _under(place, saved):
                deferred = Deferred(place, own, self.names)
                taken.defer(deferred)
                if own:
                    all_deferred.append(deferred)
        return all_deferred

    def commit(self) -> None:
        """Replace the numbers and arrays in the objects with those that were written."""
        for nest in self._nests:
            nest.commit()


@final
class _Nest:
    """One of the objects: a nest of others, or a single one."""

    def __init__(self, objects: MutableMapping[str, Any], name: str) -> None:
        self._objects = objects
        self._name = name
        nest = opened(objects[name], data_only=False, is_leaf=_is_leaf)
        paths, self._structure = jax.tree_util.tree_flatten_with_path(nest, is_leaf=_is_leaf)
        self._keys = [joined(name, _path_text(path)) for path, _ in paths]
        self._leaves = [leaf for _, leaf in paths]
        self._changed = False

    def leaves(self) -> Iterator[tuple[str, TypeHandler, Leaf]]:
        for index, (key, leaf) in enumerate(zip(self._keys, self._leaves, strict=True)):
            handler = handler_of(leaf)
            if handler is None:
                handler = TypeHandler(lambda _: True, lambda leaf, _, i=index: self._plain(i, leaf))
            yield key, handler, leaf

    def _plain(self, index: int, leaf: Leaf) -> ObjectEntries:
        """Return the entry of a plain value, which is restored by replacing it in the nest."""

        def read() -> Leaf:
            return leaf

        def replace(value: Leaf) -> None:
            self._leaves[index] = value
            self._changed = True

        if type(leaf) is int and leaf.bit_length() > _MOST_BITS:
            raise InvalidArgument(
                f"A checkpoint cannot hold {self._keys[index]!r}, a number of {leaf.bit_length()} "
                f"bits: {_MOST_BITS} are the most. Give it as an array or as a word."
            )
        if leaf is None or type(leaf) in (bool, int, float, str):
            return ObjectEntries({"": ValueEntry(read, replace)})
        if isinstance(leaf, jax.Array):
            entry = ArrayEntry(leaf.shape, leaf.dtype, read, lambda x: replace(placed(leaf, x)))
            return ObjectEntries({"": entry})
        if isinstance(leaf, np.generic) and leaf.dtype.kind not in "OSUMm":
            entry = ArrayEntry(leaf.shape, leaf.dtype, read, lambda x: replace(x[()]))
            return ObjectEntries({"": entry})
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "OSUMm":
            return ObjectEntries({"": ArrayEntry(leaf.shape, leaf.dtype, read, replace)})
        raise InvalidType(
            f"A checkpoint cannot hold {self._keys[index]!r}, which is a "
            f"{type(leaf).__module__}.{type(leaf).__qualname__}. Give it variables, optimizers, "
            "models, iterators, arrays, numbers, words, or nests of these."
        )

    def commit(self) -> None:
        if self._changed:
            new = jax.tree.unflatten(self._structure, self._leaves)
            self._objects[self._name] = _refilled(self._objects[self._name], new)


def _require_known(key: str, dtype: Any) -> None:
    if not jnp.issubdtype(dtype, jax.dtypes.prng_key) and dtype_name(dtype) not in _DTYPES:
        raise InvalidType(
            f"A checkpoint cannot hold {key!r}: its format has no arrays of {dtype_name(dtype)}. "
            "Convert it, or leave it out."
        )


def _under(place: str, keys: Iterable[str]) -> list[str]:
    return [key for key in keys if key.startswith(f"{place}/")]


def _is_leaf(node: object) -> bool:
    return node is None or handler_of(node) is not None


def _path_text(path: KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _refilled(old: Nest, new: Nest) -> Nest:
    """Return `new`, but fill mutable containers in place: the program holds references to them."""
    if old is None:
        return new
    if _is_leaf(old):
        return old
    if isinstance(old, MutableMapping):
        for key, value in new.items():
            old[key] = _refilled(old[key], value)
        return old
    if type(old) is list:
        old[:] = [_refilled(*pair) for pair in zip(old, new, strict=True)]
        return old
    if isinstance(old, tuple):
        filled = [_refilled(*pair) for pair in zip(old, new, strict=True)]
        return type(old)(*filled) if hasattr(old, "_fields") else tuple(filled)
    if (names := record_fields(type(old))) is not None:
        values = {name: _refilled(getattr(old, name), getattr(new, name)) for name in names}
        try:
            for name, value in values.items():
                setattr(old, name, value)
        except AttributeError:  # it is frozen
            return new
        return old
    return new


def placed(like: jax.Array, value: jax.Array | np.ndarray) -> jax.Array:
    """Return `value` on the devices of another array, which may span several processes."""
    if not like.committed:  # it must still follow the arrays that it is combined with
        return jnp.asarray(value)
    if not isinstance(value, np.ndarray):
        return jax.device_put(value, like.sharding)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: value[index])


def entry_of(variable: Variable) -> ArrayEntry:
    """Return a variable's entry for a checkpoint."""
    parts = worker_parts(variable)

    def read() -> Any:
        return variable.value if parts is None else own_part(variable)

    def write(value: Any) -> None:
        if parts is not None:
            store_own_part(variable, value)
        elif variable.partition is None:
            # It may be restored in the scope of another strategy.
            with _context.entered(_context.outside_of_scopes()):
                variable.assign(value)
        else:  # written part by part: the whole may be too large for one device
            store_whole_array(variable, value)

    return ArrayEntry(
        variable.shape,
        variable.dtype,
        read,
        write,
        variable,
        lasting=True,  # programs do not reuse the memory of a state that was read
        parts=parts,
    )


def _list_iterator_entries(iterator: _Resumable, _: object) -> ObjectEntries:
    shared = isinstance(iterator, DistributedIterator) and iterator._reads_alike
    return ObjectEntries({"": PositionEntry(iterator.get_state, iterator.set_state, shared)})


register(TypeHandler(lambda thing: isinstance(thing, _Resumable), _list_iterator_entries))
register(
    TypeHandler(
        lambda thing: isinstance(thing, Variable),
        lambda variable, _: ObjectEntries({"": entry_of(variable)}),
    )
)
