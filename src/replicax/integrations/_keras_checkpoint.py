"""What checkpoints hold of Keras models, layers, optimizers, metrics and variables."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import jax.numpy as jnp

from replicax import _bridges
from replicax.checkpoint import ArrayPart, Kind, NameOf, TakenApart
from replicax.errors import CheckpointMismatch
from replicax.strategies import Strategy
from replicax.variables import Variable


def _recognise(thing: Any) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(
        thing,
        (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.Variable),
    )


def _take_apart(thing: Any, _: NameOf) -> TakenApart:
    keras = sys.modules["keras"]
    if isinstance(thing, keras.Variable):
        return TakenApart({"": _part(thing)})
    if isinstance(thing, keras.metrics.Metric):
        return TakenApart(_by_path(thing.variables))
    if isinstance(thing, keras.optimizers.Optimizer):
        return TakenApart(
            _by_position(thing.variables),
            make=None if thing.built else _refuse_unbuilt_optimizer,
        )
    parts = _by_path(thing.variables)
    optimizer = getattr(thing, "optimizer", None) if isinstance(thing, keras.Model) else None
    if isinstance(thing, keras.Model):
        measured = _by_path(thing.metrics_variables, optional=True)
        parts |= {f"metrics/{name}": part for name, part in measured.items()}
    if optimizer is not None:
        slots = _by_position(optimizer.variables)
        parts |= {f"optimizer/{name}": part for name, part in slots.items()}

    def make(place: str) -> None:
        if not thing.built:
            raise CheckpointMismatch(
                f"The Keras model {place!r} has no variables yet to restore into. Build it first: "
                "call `model.build(input_shape)`, or the model with a batch."
            )
        if optimizer is not None and not optimizer.built:
            with _scope_of(thing.trainable_variables):
                optimizer.build(thing.trainable_variables)

    return TakenApart(parts, make=make)


def _refuse_unbuilt_optimizer(place: str) -> None:
    raise CheckpointMismatch(
        f"The Keras optimizer {place!r} has no slots yet to restore into. Make them first: call "
        "`optimizer.build(model.trainable_variables)`, in the strategy's scope."
    )


def _scope_of(variables: Iterable[Any]) -> Any:
    """That of the strategy to which variables belong."""
    for variable in variables:
        ours = _bridges.variable_of(variable)
        if isinstance(ours, Variable) and isinstance(ours.strategy, Strategy):
            return ours.strategy.scope()
    return nullcontext()


def _part(variable: Any, optional: bool = False) -> ArrayPart:
    return ArrayPart(
        tuple(variable.shape),
        jnp.dtype(variable.dtype),
        lambda: variable.value,
        # Through ours, so that it comes to all devices of its strategy.
        lambda value: _bridges.variable_of(variable).assign(value),
        optional=optional,
    )


def _by_path(variables: Iterable[Any], optional: bool = False) -> dict[str, ArrayPart]:
    """By their paths, as Keras numbers them in a fresh process.

    Keras counts the layers of a class over all models of a process: `dense_7` of the second model
    is the `dense_3` of the first.
    """
    numbers: dict[str, dict[str, int]] = {}
    parts: dict[str, ArrayPart] = {}
    for variable in variables:
        words = []
        for word in variable.path.split("/"):
            base = re.sub(r"_\d+$", "", word)
            known = numbers.setdefault(base, {})
            number = known.setdefault(word, len(known))
            words.append(base if number == 0 else f"{base}_{number}")
        name = unnumbered = "/".join(words)
        count = 1
        while name in parts:  # variables that the user gave one name
            count += 1
            name = f"{unnumbered}#{count}"
        parts[name] = _part(variable, optional)
    return parts


def _by_position(variables: Iterable[Any]) -> dict[str, ArrayPart]:
    """By position, and by what they are for: their paths have those of the trained variables."""
    return {
        f"{position}_{variable.path.rpartition('_')[2].rpartition('/')[2]}": _part(variable)
        for position, variable in enumerate(variables)
    }


KERAS = Kind(_recognise, _take_apart)
