"""A check of arguments against the `input_signature` of an `rx.function`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _nest
from replicax._describing import described
from replicax._typing import Leaf
from replicax.errors import InvalidType
from replicax.input import DistributedIterator
from replicax.values import PerReplica

_ADVICE = "Give something like `[jax.ShapeDtypeStruct((8, 2), jnp.float32)]`."


def checked(name: str, signature: object) -> tuple[object, ...] | None:
    """Return the input signature that was given to the function `name`, after checking it."""
    if signature is None:
        return None
    if not isinstance(signature, (list, tuple)):
        raise InvalidType(
            f"The input signature of `{name}` must be a list or tuple, with one entry for each "
            f"argument; got {described(signature)}. {_ADVICE}"
        )
    for leaf in _nest.flatten(tuple(signature), keep_opaque=True)[0]:
        if not isinstance(leaf, (jax.ShapeDtypeStruct, jax.Array, np.ndarray, np.generic)):
            raise InvalidType(
                f"The input signature of `{name}` must say the shape and dtype of each argument; "
                f"got {described(leaf)}. {_ADVICE}"
            )
    return tuple(signature)


def conformed(
    name: str, signature: tuple[object, ...], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[Any, ...]:
    """Return the arguments of the function `name`, with numbers converted to the requested arrays.

    Arguments that the signature does not allow are refused.
    """
    wanted, structure = _nest.flatten(signature, keep_opaque=True)
    given, given_structure = _nest.flatten(args, keep_opaque=True)
    if kwargs or given_structure != structure:
        raise InvalidType(
            f"`{name}` has the input signature {signature}, and was called with "
            f"{args}{f' and {kwargs}' if kwargs else ''}, which has another structure."
        )
    leaves = [_leaf(name, spec, leaf) for spec, leaf in zip(wanted, given, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def _leaf(name: str, spec: jax.ShapeDtypeStruct, leaf: Leaf) -> Leaf:
    if isinstance(leaf, DistributedIterator):
        raise InvalidType(
            f"`{name}` has the input signature {spec}, and was called with an iterator. Give it "
            "an element, `next(iterator)`, or leave the signature out."
        )
    if isinstance(leaf, (bool, int, float, complex)):
        leaf = jnp.asarray(leaf, spec.dtype)
    samples = leaf.samples() if isinstance(leaf, PerReplica) else (leaf,)
    for sample in samples:
        shape, dtype = np.shape(sample), getattr(sample, "dtype", None)
        # A last partial batch has fewer rows than the signature says.
        fewer = len(shape) == len(spec.shape) > 0 and shape[0] <= spec.shape[0]
        if dtype != spec.dtype or not (
            shape == spec.shape or (fewer and shape[1:] == spec.shape[1:])
        ):
            raise InvalidType(
                f"`{name}` has the input signature {spec}, and was called with a value of shape "
                f"{shape} and dtype {dtype}."
            )
    return leaf
