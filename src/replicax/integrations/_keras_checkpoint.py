"""What checkpoints hold of Keras models, layers, optimizers, metrics and variables."""

from __future__ import annotations

import functools
import re
import sys
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from replicax import _bridges, _context
from replicax.checkpoint import ArrayPart, Deferred, Kind, NameOf, TakenApart
from replicax.errors import CheckpointMismatch, ContextError
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
        return TakenApart(_by_path(thing.variables, [thing]))
    if isinstance(thing, keras.optimizers.Optimizer):
        return _take_optimizer_apart(thing)
    if isinstance(thing, keras.Model):
        thing.jax_state_sync()  # in a callback of `fit`, the values of the last step are elsewhere
    parts = _by_path(thing.variables, thing._flatten_layers())
    optimizer = getattr(thing, "optimizer", None) if isinstance(thing, keras.Model) else None
    if isinstance(thing, keras.Model):
        measured = _by_path(thing.metrics_variables, thing.metrics, optional=True)
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


# What was restored for slots that an optimizer has not made yet.
_waiting: weakref.WeakKeyDictionary[Any, Deferred] = weakref.WeakKeyDictionary()


def _take_optimizer_apart(optimizer: Any) -> TakenApart:
    parts = _by_position(optimizer.variables)
    if optimizer.built:
        return TakenApart(parts)
    if type(optimizer).variables is not sys.modules["keras"].optimizers.Optimizer.variables:
        # One that wraps others: its variables change places when it is built.
        return TakenApart(parts, make=_refuse_unbuilt_optimizer)

    def defer(deferred: Deferred) -> None:
        if optimizer not in _waiting:
            _fill_when_built(optimizer)
        _waiting[optimizer] = deferred

    waiting = _waiting.get(optimizer)
    return TakenApart(parts, defer, {} if waiting is None else waiting.waiting)


def _fill_when_built(optimizer: Any) -> None:
    """Have an optimizer give its slots what waits for them, in the moment when it makes them."""
    build = optimizer.build

    @functools.wraps(build)
    def build_and_fill(variables: Any) -> None:
        # Here, because it imports Keras.
        from replicax.integrations.keras._scope import outside_of_functions

        with outside_of_functions():  # or they would have no numbers before the function ends
            build(variables)
        deferred = _waiting[optimizer]
        restored = [
            (part, deferred.take(name, part.shape, part.dtype))
            for name, part in _by_position(optimizer.variables).items()
            if name not in before
        ]
        # Now, also while a program is traced: as the slots do, this begins with numbers.
        with _context.entered(_context.Frame()), jax.ensure_compile_time_eval():
            for part, value in restored:
                if value is not None:
                    part.write(value)
        deferred.settle()
        del _waiting[optimizer], optimizer.build

    before = _by_position(optimizer.variables).keys()
    optimizer.build = build_and_fill


def _refuse_unbuilt_optimizer(place: str) -> None:
    raise CheckpointMismatch(
        f"The Keras optimizer {place!r} has no slots yet to restore into. Make them first: call "
        "`optimizer.build(model.trainable_variables)`, in the strategy's scope."
    )


def _scope_of(variables: Iterable[Any]) -> Any:
    """Return the scope of the strategy to which variables belong."""
    for variable in variables:
        ours = _bridges.variable_of(variable)
        if isinstance(ours, Variable) and isinstance(ours.strategy, Strategy):
            return ours.strategy.scope()
    return nullcontext()


def _part(variable: Any, optional: bool = False) -> ArrayPart:
    return ArrayPart(
        tuple(variable.shape),
        jnp.dtype(variable.dtype),
        lambda: _value_of(variable),
        # Through ours, so that it comes to all devices of its strategy.
        lambda value: _bridges.variable_of(variable).assign(value),
        optional=optional,
    )


def _value_of(variable: Any) -> Any:
    if variable._value is None:
        raise ContextError(
            f"The Keras variable {variable.path!r} has no value now: in a callback of `fit`, Keras "
            "keeps the values of the last step elsewhere. Give the checkpoint the model itself, or "
            "call `model.jax_state_sync()` before."
        )
    return variable.value


def _by_path(
    variables: Iterable[Any], named: Iterable[Any], optional: bool = False
) -> dict[str, ArrayPart]:
    """Name variables by their paths, as Keras numbers them in a fresh process.

    Keras counts the layers of a class over all models of a process: `dense_7` of the second model
    is the `dense_3` of the first. Names that somebody has given stay as they are.

    Args:
      variables: The variables.
      named: The objects that they may belong to, whose names are in the paths.
      optional: Whether they may be lacking.
    """
    variables = list(variables)
    bases = {
        thing.name: base
        for thing in (*named, *variables)
        for base in [_automatic_base(thing.name, _snake_case(type(thing).__name__))]
        if base is not None
    }
    numbers: dict[str, dict[str, int]] = {}
    parts: dict[str, ArrayPart] = {}
    for variable in variables:
        words = []
        for word in variable.path.split("/"):
            base = bases.get(word) or _automatic_base(word, "seed_generator")
            if base is None:
                words.append(word)
                continue
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


def _automatic_base(name: str, class_name: str) -> str | None:
    """Return what Keras numbered to get this name; None if it is not the name of the class.

    `Bidirectional` puts a word before the name of its layer.
    """
    matched = re.fullmatch(rf"((?:forward_|backward_)?{re.escape(class_name)})(_\d+)?", name)
    return matched and matched[1]


def _snake_case(name: str) -> str:
    """Return what `keras.src.utils.naming.to_snake_case` returns."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _by_position(variables: Iterable[Any]) -> dict[str, ArrayPart]:
    """Name slots by position and purpose: their paths have those of the trained variables."""
    return {
        f"{position}_{variable.path.rpartition('_')[2].rpartition('/')[2]}": _part(variable)
        for position, variable in enumerate(variables)
    }


KERAS = Kind(_recognise, _take_apart)
