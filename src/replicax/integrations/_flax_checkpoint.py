"""Checkpoints of Flax NNX modules, optimizers, metrics and random streams."""

from __future__ import annotations

import sys
from typing import Any

import jax

from replicax.checkpoint import ArrayEntry, NameOf, ObjectEntries, TypeHandler, placed
from replicax.errors import InvalidType


def _recognise(thing: object) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(thing, (nnx.Pytree, nnx.Variable))


def _list_entries(thing: object, _: NameOf) -> ObjectEntries:
    nnx: Any = sys.modules["flax.nnx"]
    if isinstance(thing, nnx.Variable):
        return ObjectEntries({"": _entry("", thing)})
    entries = {}
    for path, node in nnx.iter_graph(thing):
        if isinstance(node, nnx.Variable):
            name = "/".join(map(str, path))
            entries[name] = _entry(name, node)
    return ObjectEntries(entries)


def _entry(name: str, variable: Any) -> ArrayEntry:
    value = variable.get_value()
    if not isinstance(value, jax.Array):
        raise InvalidType(
            f"A checkpoint cannot hold the {type(variable).__name__} {name!r} of an NNX object: "
            f"its value is no array, but {value!r}. Leave it out, or keep arrays in it."
        )
    return ArrayEntry(
        value.shape,
        value.dtype,
        variable.get_value,
        lambda new: variable.set_value(placed(variable.get_value(), new)),
        put_back=variable.set_value,
    )


NNX = TypeHandler(_recognise, _list_entries)
