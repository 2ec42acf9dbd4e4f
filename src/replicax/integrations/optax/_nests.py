"""The nests in which a transformation sees variables and their gradients."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import jax

from replicax import _nest
from replicax._describing import described
from replicax._typing import Nest
from replicax.errors import InvalidArgument, InvalidType, StructureMismatch
from replicax.variables import Variable, without_settings

Path = tuple[Any, ...]


@final
@dataclass(frozen=True, slots=True)
class Nests:
    """The structures of the nests that were given.

    Args:
      params: The structure of the variables.
      paths: The path of each variable in it.
      gradients: The structure of the gradients.
      differentiated: For each gradient, the index of its variable.
    """

    params: Any
    paths: tuple[Path, ...]
    gradients: Any
    differentiated: tuple[int, ...]

    def same_places(self, other: Nests) -> bool:
        return (self.paths, self.differentiated) == (other.paths, other.differentiated)

    def __str__(self) -> str:
        return ", ".join(jax.tree_util.keystr(path) or "a leaf" for path in self.paths)


@final
@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a call.

    Args:
      gradients: The gradients that were given.
      variables: The variable of each gradient.
      params: All variables, in the order of the leaves of the nest.
      nests: The structures of the nests, or None for pairs.
    """

    gradients: list[Any]
    variables: tuple[Variable, ...]
    params: tuple[Variable, ...]
    nests: Nests | None


def of_pairs(pairs: Sequence[object]) -> Given:
    gradients, variables = [], []
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidType(
                "`apply_gradients` takes (gradient, variable) pairs, or two nests; got "
                f"{described(pair)} in the place of a pair."
            )
        gradients.append(pair[0])
        variables.append(pair[1])
        require_variable(pair[1])
    return Given(gradients, tuple(variables), tuple(variables), None)


def of_nests(gradients: Nest, params: Nest) -> Given:
    """Return the contents of two nests, which must have the same structure.

    With `optax.lookahead`, the gradients are for the fast variables alone.
    """
    params = without_settings(params)
    found, structure = _nest.flatten(gradients, everything=True)
    variables, whole = _nest.flatten(params, everything=True)
    for variable in variables:
        require_variable(variable)
    places = jax.tree.unflatten(whole, range(len(variables)))
    differentiated = params.fast if _is_of_lookahead(params) else params
    indices, expected = _nest.flatten(
        places.fast if _is_of_lookahead(params) else places, everything=True
    )
    if structure != expected:
        raise StructureMismatch(
            f"`apply_gradients` got gradients of the structure {structure}, and variables of the "
            f"structure {_nest.flatten(differentiated, everything=True)[1]}. Give one gradient for "
            "each variable, in the same nest."
        )
    with_paths, seen = jax.tree_util.tree_flatten_with_path(places)
    if len(with_paths) == len(variables):
        nests = Nests(seen, tuple(path for path, _ in with_paths), expected, tuple(indices))
    else:
        # JAX, and so Optax, does not take such containers apart; Optax gets a dict by path instead.
        named, _ = _nest.flatten_with_paths(params, everything=True)
        nests, order = _of_dict([name for name, _ in named])
        variables = [variables[index] for index in order]
        found = [found[indices.index(index)] for index in order]
        indices = range(len(order))
    trained = tuple(variables[index] for index in indices)
    return Given(found, trained, tuple(variables), nests)


def by_name(variables: Sequence[Variable]) -> tuple[Nests, tuple[Variable, ...]]:
    """Return the nests of a dict keyed by variable names, and the variables in its order.

    The first of several equal names is kept, and the others are numbered: "w", "w_1", "w_2".
    """
    names: list[str] = []
    for variable in variables:
        name, number = variable.name, 0
        own = {each.name for each in variables} if name in names else set()
        while name in names or (number and name in own):
            number += 1
            name = f"{variable.name}_{number}"
        names.append(name)
    nests, order = _of_dict(names)
    return nests, tuple(variables[index] for index in order)


def _of_dict(names: Sequence[str]) -> tuple[Nests, list[int]]:
    """Return the nests of a dict, and the indices of its leaves in `names`."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(
        {name: index for index, name in enumerate(names)}
    )
    paths = tuple(path for path, _ in leaves)
    return Nests(structure, paths, structure, tuple(range(len(names)))), [i for _, i in leaves]


def _is_of_lookahead(params: Nest) -> bool:
    optax = sys.modules.get("optax")  # it is imported if such params exist
    return optax is not None and isinstance(params, optax.LookaheadParams)


def require_variable(value: object) -> None:
    if not isinstance(value, Variable):
        raise InvalidType(
            "`apply_gradients` takes (gradient, variable) pairs, of `rx.Variable`s; got "
            f"{described(value)} in the place of a variable."
        )


def require_once(variables: Sequence[Variable]) -> None:
    if len({id(variable) for variable in variables}) < len(variables):
        raise InvalidArgument(
            f"`apply_gradients` got a variable twice: {names_of(variables)}. Add its gradients "
            "first."
        )


def names_of(variables: Sequence[Variable]) -> str:
    return ", ".join(repr(variable.name) for variable in variables)
