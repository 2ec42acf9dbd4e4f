"""The inputs and outputs of the `shard_map` of a `run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from replicax import _nest
from replicax._typing import Nest
from replicax.execution._iterator_elements import NotOneProgram
from replicax.topology import REPLICA_AXIS, Topology
from replicax.values import Mirrored, PerReplica, Shape

SPLIT, SAME = PartitionSpec(REPLICA_AXIS), PartitionSpec()


@final
class RunArguments:
    """The arguments of a `run`: the operands of a `shard_map`, and the rest."""

    def __init__(self, nest: Nest, topology: Topology) -> None:
        leaves, self._structure = _nest.flatten(nest, keep_opaque=True)
        self.operands: list[Any] = []
        self.specs: list[PartitionSpec] = []
        self.shapes: list[Sequence[Shape]] = []  # per value, the shapes on all replicas
        self.uneven_shapes: list[Sequence[Shape]] = []
        self._fill: list[Callable[[Any, Sequence[Shape]], Any]] = []
        self.leaves = leaves
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, PerReplica):
                if not all(is_number_like(sample) for sample in leaf.samples()):
                    raise NotOneProgram
                if leaf.common is None:
                    self.shapes.append(leaf.shapes)
                if not leaf.uniform:
                    self._add_uneven(index, leaf, topology)
                elif leaf.common is not None:
                    self._add(index, leaf.common, SAME, False)
                else:
                    self._add(index, leaf.array(topology), SPLIT, leaf.scalars)
            elif isinstance(leaf, Mirrored):
                self._add(index, leaf.array(topology), SAME, False)
            elif isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
                self._add(index, jnp.asarray(leaf), SAME, False)

    def _add(self, index: int, operand: object, spec: PartitionSpec, scalar: bool) -> None:
        self.operands.append(operand)
        self.specs.append(spec)
        self._fill.append(lambda local, _: (index, local[0] if scalar else local))

    def _add_uneven(self, index: int, leaf: PerReplica, topology: Topology) -> None:
        if not leaf.traced:  # closed over, and perhaps another value at the next call
            raise NotOneProgram
        number = len(self.uneven_shapes)
        self.uneven_shapes.append(leaf.shapes)
        self.operands.append(leaf.padded(topology))
        self.specs.append(SPLIT)
        self._fill.append(lambda local, shapes: (index, local[tuple(map(slice, shapes[number]))]))

    def rebuild(self, operands: list[jax.Array], shapes: Sequence[Shape]) -> Nest:
        """Return the arguments inside the program; operands whose shapes differ get `shapes`."""
        leaves = list(self.leaves)
        for fill, operand in zip(self._fill, operands, strict=True):
            index, local = fill(operand, shapes)
            leaves[index] = local
        return jax.tree.unflatten(self._structure, leaves)


@final
class RunResults:
    """The results of a `run`: arrays of the `shard_map`, and all other objects.

    Args:
      given: Python numbers in the arguments, which are returned unchanged.
    """

    _shapes: Sequence[Sequence[Shape] | None] = ()

    def __init__(self, given: Sequence[Any]) -> None:
        self._given = given

    def take(self, nest: Nest) -> list[jax.Array]:
        """Return the arrays inside the program, with a first dimension to concatenate along."""
        leaves, self._structure = _nest.flatten(nest, keep_opaque=True)
        self._numeric = [
            is_number_like(leaf) and not is_among(leaf, self._given) for leaf in leaves
        ]
        pairs = list(zip(leaves, self._numeric, strict=True))
        arrays = [jnp.asarray(leaf) for leaf, numeric in pairs if numeric]
        self._scalars = [array.ndim == 0 for array in arrays]
        self._plain = [None if numeric else leaf for leaf, numeric in pairs]
        return [
            array[None] if scalar else array
            for array, scalar in zip(arrays, self._scalars, strict=True)
        ]

    def require_alike(self, others: Sequence[RunResults]) -> int:
        """Refuse outputs of other variants that do not match; return the number of arrays."""
        for other in others:
            if (
                other._structure != self._structure
                or other._numeric != self._numeric
                or other._scalars != self._scalars
                or not all(map(_is_same, other._plain, self._plain))
            ):
                raise NotOneProgram
        return len(self._scalars)

    def note_shapes(self, shapes: Sequence[Sequence[Shape]]) -> None:
        """Note the shapes of each array on the replicas, if they differ."""
        self._shapes = [None if len(set(each)) == 1 else each for each in shapes]

    def rebuild(
        self,
        arrays: list[jax.Array],
        topology: Topology,
        common: Sequence[bool],
        sums: Mapping[int, jax.Array],
    ) -> Nest:
        """Return the nest outside the program, with per-replica values.

        `common` says which arrays came out once; `sums` has the known sums over the replicas.
        """

        def value(
            number: int,
            array: jax.Array,
            scalar: bool,
            shapes: Sequence[Shape] | None,
            once: bool,
        ) -> Any:
            if shapes is not None:
                return PerReplica.from_padded(array, topology, shapes)
            if topology.num_replicas > 1 and not once:
                each = PerReplica.from_array(array, topology, scalars=scalar)
                if number in sums:
                    each.note_sum(sums[number][0] if scalar else sums[number])
                return each
            array = array[0] if scalar else array
            return PerReplica.of_common(array, topology) if once else array

        shapes = self._shapes or [None] * len(arrays)
        once = common or [False] * len(arrays)
        values = map(value, range(len(arrays)), arrays, self._scalars, shapes, once)
        leaves = [
            next(values) if numeric else leaf
            for numeric, leaf in zip(self._numeric, self._plain, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)


def is_number_like(leaf: object) -> bool:
    """Tell whether a leaf is, or stands for, an array or a number."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
        return True
    return isinstance(leaf, jax.ShapeDtypeStruct)


def python_numbers(leaves: Sequence[object]) -> list[Any]:
    """Return the Python numbers among the arguments of a function.

    They may be settings of a model that is passed as state, such as the rate of a dropout layer. As
    arrays they would be trained, and `if` would not accept them.
    """
    return [leaf for leaf in leaves if isinstance(leaf, (bool, int, float, complex))]


def is_among(leaf: object, given: Sequence[object]) -> bool:
    """Tell whether a result is one of these objects."""
    return any(leaf is each for each in given)


def _is_same(mine: object, yours: object) -> bool:
    return mine is yours or (type(mine) is type(yours) and bool(mine == yours))
