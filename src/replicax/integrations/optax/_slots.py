"""The state of a transformation, split into arrays, which become variables, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax.checkpoint import NameOf
from replicax.errors import InvalidArgument
from replicax.integrations.optax._nests import Path
from replicax.variables import Variable

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef

    from replicax._typing import Nest

_NUMERIC = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@final
@dataclass(frozen=True, slots=True)
class StateStructure:
    """The structure of a state.

    Args:
      structure: The pytree structure of the state.
      others: The leaves that are neither arrays nor numbers, such as functions, with None in place
        of those that are.
      paths: The paths of the arrays.
      dtypes: The types that the arrays keep. A Python number becomes an array of a fixed type.
    """

    structure: PyTreeDef
    others: tuple[object, ...]
    paths: tuple[Path, ...]
    dtypes: tuple[np.dtype, ...]

    @classmethod
    def of(cls, state: object) -> tuple[StateStructure, list[jax.Array]]:
        """Return the structure and the arrays of a state."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        others = tuple(None if isinstance(leaf, _NUMERIC) else leaf for _, leaf in leaves)
        arrays = [(path, jnp.asarray(leaf)) for path, leaf in leaves if isinstance(leaf, _NUMERIC)]
        paths = tuple(path for path, _ in arrays)
        dtypes = tuple(array.dtype for _, array in arrays)
        return cls(structure, others, paths, dtypes), [array for _, array in arrays]

    @classmethod
    def after_update(
        cls, state: object, update: Callable[..., object], arguments: Sequence[jax.ShapeDtypeStruct]
    ) -> tuple[StateStructure, list[jax.Array]]:
        """Return the structure and arrays of a state to which the first `update` may add some.

        Added arrays, such as the measurements of `optax.monitor`, start as zeros. `update` takes
        the state and further arguments, whose shapes and dtypes are given.
        """
        found, arrays = cls.of(state)
        if not any(_is_empty(leaf) for leaf in jax.tree.leaves(state, is_leaf=_is_empty)):
            return found, arrays
        grown: list[StateStructure] = []

        def updated(*arguments: object) -> list[jax.Array]:
            structure, arrays = cls.of(update(state, *arguments))
            grown.append(structure)
            return arrays

        shapes = jax.eval_shape(updated, *arguments)
        if grown[0].structure == found.structure:
            return found, arrays
        known = dict(zip(found.paths, arrays, strict=True))
        return grown[0], [
            known[path] if path in known else jnp.zeros(like.shape, like.dtype)
            for path, like in zip(grown[0].paths, shapes, strict=True)
        ]

    def state(self, arrays: Sequence[object]) -> Nest:
        """Return the state that has these arrays."""
        remaining = iter(arrays)
        leaves = [next(remaining) if other is None else other for other in self.others]
        return jax.tree.unflatten(self.structure, leaves)

    def arrays(self, state: object) -> list[jax.Array]:
        """Return the arrays of another state of this structure."""
        leaves, structure = jax.tree.flatten(state)
        if structure != self.structure:
            raise InvalidArgument(
                f"The state of the transformation was {self.structure}, and is {structure} after "
                "an update. The state of an optimizer must keep its structure; look for a "
                "condition in `update`."
            )
        found = [leaf for leaf, other in zip(leaves, self.others, strict=True) if other is None]
        return [jnp.asarray(x, dtype) for x, dtype in zip(found, self.dtypes, strict=True)]


@final
@dataclass(frozen=True, slots=True)
class Owner:
    """The variable that an array of the state is for.

    A state contains nests like the params, sometimes several: the path of an array in them ends
    with that of its variable.

    Args:
      variable: The variable, or None for arrays of the optimizer as a whole, such as a count.
      path: The path in the state, without the variable's path at its end.
    """

    variable: Variable | None
    path: str

    @classmethod
    def of(
        cls,
        path: Path,
        shape: tuple[int, ...],
        paths: Sequence[Path],
        variables: Sequence[Variable],
    ) -> Owner:
        fitting = [
            (len(each), index)
            for index, each in enumerate(paths)
            # A nest that is a single variable has an empty path, with which every path ends.
            if path[len(path) - len(each) :] == each and (each or variables[index].shape == shape)
        ]
        if not fitting:
            return cls(None, jax.tree_util.keystr(path))
        length, index = max(fitting, key=lambda found: found[0])
        return cls(variables[index], jax.tree_util.keystr(path[: len(path) - length]))

    def checkpoint_name(self, name_of: NameOf, path: Path) -> str:
        """Return the name of the array in a checkpoint.

        It contains the variable's name if the checkpoint has the variable too, so that the array is
        found even if the variables are in another order or in another nest.
        """
        name = None if self.variable is None else name_of(self.variable)
        if name is None:
            return f"slots/{jax.tree_util.keystr(path)}"
        return f"slots/{self.path}/{name}"


def _is_empty(node: object) -> bool:
    return node is None or (isinstance(node, (dict, list)) and not node)
