"""NNX variables as replicax variables."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from replicax import _context
from replicax._enums import VariableAggregation, VariableSynchronization
from replicax.errors import InvalidType
from replicax.integrations.flax._discovery import Reached
from replicax.integrations.flax._private import set_raw_value
from replicax.variables import (
    Variable,
    VariableRequest,
    adopt,
)

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef

    from replicax._typing import Leaf, StrategyLike


@final
class _Adoptions:
    """The adopted variables, kept by modules, as NNX variables do not support weak references."""

    def __init__(self) -> None:
        self.by_id: weakref.WeakValueDictionary[int, Adopted] = weakref.WeakValueDictionary()
        self._kept_by: dict[int, dict[int, Adopted]] = {}
        self._kept_for_good: dict[int, Adopted] = {}  # for holders that do not support them

    def keep(self, found: Adopted, variable: nnx.Variable, holder: object) -> None:
        kept = self._kept_by.get(id(holder))
        if kept is None:
            try:
                weakref.finalize(holder, self._kept_by.pop, id(holder), None)
            except TypeError:
                kept = self._kept_for_good
            else:
                kept = self._kept_by[id(holder)] = {}
        kept[id(variable)] = found


_adoptions = _Adoptions()


def adopted(reached: Reached) -> Adopted:
    """Adopt an NNX variable, for as long as its module lives."""
    variable = reached.variable
    found = _adoptions.by_id.get(id(variable))
    if found is None:
        found = _adoptions.by_id[id(variable)] = Adopted(variable, reached.name)
    _adoptions.keep(found, variable, reached.holder)
    return found


def standing_for(variable: nnx.Variable) -> Adopted | None:
    """Return the adopted form of a variable, if it has been adopted."""
    return _adoptions.by_id.get(id(variable))


@final
class Adopted:
    """An NNX variable, and our variables that represent it: one for each of its arrays.

    Each strategy that uses it has variables of its own. `strategy` is the one that used it last.
    """

    __slots__ = ("__weakref__", "_by_strategy", "_form", "name", "strategy", "variable")

    def __init__(self, variable: nnx.Variable, name: str) -> None:
        if variable.hijax or variable.ref:
            raise InvalidType(
                f"The NNX variable {name!r} keeps a `{'hijax' if variable.hijax else 'ref'}` "
                "reference, which strategies do not know. Make it without: "
                "`nnx.var_defaults(hijax=False, ref=False)`."
            )
        self.variable, self.name = variable, name
        self.strategy: StrategyLike | None = None
        self._form: _Form | None = None
        self._by_strategy: dict[StrategyLike | None, list[Variable]] = {}

    def variables(self, strategy: StrategyLike | None) -> list[Variable]:
        """Return the variables of a strategy, or those used without one."""
        form = _Form.of(self.variable.get_raw_value(), self.name)
        if form != self._form:
            self._form = form
            self._by_strategy.clear()
        found = self._by_strategy.get(strategy)
        if found is None:
            # They are created immediately, even while a program is traced.
            with _context.entered(_context.Frame()), jax.ensure_compile_time_eval():
                found = [self._adopt(index, form, strategy) for index in form.arrays]
            self._by_strategy[strategy] = found
        return found

    def existing(self) -> list[Variable]:
        """Return the variables of all strategies that have used it."""
        return [variable for each in self._by_strategy.values() for variable in each]

    def read(self, strategy: StrategyLike | None) -> Any:
        """Return the value as seen from the current context."""
        return self.value_of([variable.value for variable in self.variables(strategy)])

    def nothing(self) -> Any:
        """Return zeros in place of the value."""
        self._form = form = _Form.of(self.variable.get_raw_value(), self.name)
        return form.value_of([jnp.zeros(*kind) for kind in form.kinds if kind is not None])

    def value_of(self, arrays: list[jax.Array]) -> Any:
        """Return the NNX value that consists of these arrays."""
        assert self._form is not None
        return self._form.value_of(arrays)

    def arrays_of(self, value: object) -> list[jax.Array]:
        """Return the arrays of an NNX value, which must have the variable's structure."""
        assert self._form is not None
        return self._form.arrays_of(value, self.name)

    def arrays_among(self, leaves: list[Leaf]) -> list[jax.Array]:
        """Return the arrays among the leaves of a value."""
        assert self._form is not None
        return self._form.arrays_among(leaves)

    def _adopt(self, index: int, form: _Form, strategy: StrategyLike | None) -> Variable:
        keeper = _InNNX(self.variable, index, form.keys[index])
        name = self.name if len(form.kinds) == 1 else f"{self.name}[{index}]"
        request = VariableRequest(
            None,
            isinstance(self.variable, nnx.Param),
            name,
            None,
            VariableSynchronization.AUTO,
            VariableAggregation.NONE,
        )
        return adopt(request, keeper, strategy)


@dataclass(frozen=True)
class _Form:
    """The form of a variable's value: the shapes and types of its arrays, and its other leaves.

    Most values are one array. Each tuple has one item per leaf: in `kinds`, the shape and type of
    an array; in `keys`, the kind of a random key; in `others`, a leaf that is no array. Items that
    do not apply are None.
    """

    structure: PyTreeDef
    kinds: tuple[tuple[tuple[int, ...], np.dtype] | None, ...]
    keys: tuple[Any, ...]
    others: tuple[object, ...]

    @classmethod
    def of(cls, value: object, name: str) -> _Form:
        leaves, structure = jax.tree.flatten(value)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            raise InvalidType(
                f"The NNX variable {name!r} is a tracer of a JAX transformation, which a strategy "
                "cannot distribute. Call `run` outside of `nnx.jit`, `jax.jit` and the like, and "
                "compile with `rx.function`."
            )
        keys = tuple([_key_kind(leaf) for leaf in leaves])
        data = [_as_data(leaf) for leaf in leaves]
        kinds = tuple([(x.shape, x.dtype) if _is_array(x) else None for x in data])
        others = tuple([None if kind else x for kind, x in zip(kinds, data, strict=True)])
        return cls(structure, kinds, keys, others)

    @property
    def arrays(self) -> list[int]:
        return [index for index, kind in enumerate(self.kinds) if kind is not None]

    def value_of(self, arrays: list[jax.Array]) -> Any:
        leaves = list(self.others)
        for index, array in zip(self.arrays, arrays, strict=True):
            kind = self.keys[index]
            leaves[index] = array if kind is None else jax.random.wrap_key_data(array, impl=kind)
        return jax.tree.unflatten(self.structure, leaves)

    def arrays_of(self, value: object, name: str) -> list[jax.Array]:
        leaves, structure = jax.tree.flatten(value)
        if structure != self.structure:
            raise InvalidType(
                f"The NNX variable {name!r} had the structure {self.structure}, and was given a "
                f"value of the structure {structure}. Keep it as it is in a function given to "
                "`run`."
            )
        return self.arrays_among(leaves)

    def arrays_among(self, leaves: list[Leaf]) -> list[jax.Array]:
        return [jnp.asarray(_as_data(leaves[index])) for index in self.arrays]


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray))


def _as_data(leaf: object) -> Leaf:
    """Convert numbers to arrays, and random keys to their data."""
    if isinstance(leaf, jax.Array) and not _key_kind(leaf):
        return leaf
    with jax.ensure_compile_time_eval():  # the values are concrete, even during tracing
        if isinstance(leaf, jax.Array):
            return jax.random.key_data(leaf)
        if isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex)):
            return jnp.asarray(leaf)
    return leaf


def _key_kind(leaf: object) -> Leaf:
    """Return the kind of a random key, or None for anything else."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_impl(leaf)
    return None


@final
class _InNNX:
    """A keeper of an array that is one leaf of an NNX variable's value."""

    # NNX objects have the first replica's copy, so they work as they do on one device.
    has_all_copies = False

    __slots__ = ("_array", "_index", "_key_kind", "_leaf", "_variable")

    def __init__(self, variable: nnx.Variable, index: int, key_kind: Any) -> None:
        self._variable, self._index, self._key_kind = variable, index, key_kind
        self._leaf: Any = None
        self._array: Any = None

    def get(self) -> jax.Array:
        value = self._variable.get_raw_value()
        leaf = value if isinstance(value, jax.Array) else jax.tree.leaves(value)[self._index]
        if leaf is not self._leaf:
            self._leaf, self._array = leaf, _as_data(leaf)
        return self._array

    def set(self, array: jax.Array) -> None:
        kind = self._key_kind
        leaf = array if kind is None else jax.random.wrap_key_data(array, impl=kind)
        self._leaf, self._array = leaf, array
        value = self._variable.get_raw_value()
        if not isinstance(value, jax.Array):
            leaves, structure = jax.tree.flatten(value)
            leaves[self._index] = leaf
            leaf = jax.tree.unflatten(structure, leaves)
        set_raw_value(self._variable, leaf)
