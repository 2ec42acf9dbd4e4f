"""What checkpoints hold of Flax NNX modules, optimizers, metrics and random streams."""

from __future__ import annotations

import sys
from typing import Any

import jax

from replicax.checkpoint import ArrayPart, Kind, NameOf, TakenApart, placed
from replicax.errors import InvalidType


def _recognise(thing: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(thing, (nnx.Pytree, nnx.Variable))


def _take_apart(thing: Any, _: NameOf) -> TakenApart:
    nnx: Any = sys.modules["flax.nnx"]
    if isinstance(thing, nnx.Variable):
        return TakenApart({"": _part("", thing)})
    parts = {}
    for path, node in nnx.iter_graph(thing):
        if isinstance(node, nnx.Variable):
            name = "/".join(map(str, path))
            parts[name] = _part(name, node)
    return TakenApart(parts)


def _part(name: str, variable: Any) -> ArrayPart:
    value = variable.get_value()
    if not isinstance(value, jax.Array):
        raise InvalidType(
            f"A checkpoint cannot hold the {type(variable).__name__} {name!r} of an NNX object: "
            f"its value is no array, but {value!r}. Leave it out, or keep arrays in it."
        )
    return ArrayPart(
        value.shape,
        value.dtype,
        variable.get_value,
        lambda new: variable.set_value(placed(variable.get_value(), new)),
        put_back=variable.set_value,
    )


NNX = Kind(_recognise, _take_apart)
