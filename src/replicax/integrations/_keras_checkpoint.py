"""Checkpoints of Keras models, layers, optimizers, metrics and variables."""

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
from replicax.checkpoint import ArrayEntry, Deferred, NameOf, ObjectEntries, TypeHandler
from replicax.errors import CheckpointMismatch, ContextError
from replicax.strategies import Strategy
from replicax.variables import Variable


def _recognise(thing: object) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(
        thing,
        (keras.layers.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.Variable),
    )


def _list_entries(thing: Any, _: NameOf) -> ObjectEntries:
    keras = sys.modules["keras"]
    if isinstance(thing, keras.Variable):
        return ObjectEntries({"": _entry(thing)})
    if isinstance(thing, keras.metrics.Metric):
        return ObjectEntries(_by_path(thing.variables, [thing]))
    if isinstance(thing, keras.optimizers.Optimizer):
        return _list_optimizer_entries(thing)
    if isinstance(thing, keras.Model):
        thing.jax_state_sync()  # during `fit`, Keras keeps the latest values elsewhere
    entries = _by_path(thing.variables, thing._flatten_layers())
    optimizer = getattr(thing, "optimizer", None) if isinstance(thing, keras.Model) else None
    if isinstance(thing, keras.Model):
        measured = _by_path(thing.metrics_variables, thing.metrics, optional=True)
        entries |= {f"metrics/{name}": entry for name, entry in measured.items()}
    if optimizer is not None:
        slots = _by_position(optimizer.variables)
        entries |= {f"optimizer/{name}": entry for name, entry in slots.items()}

    def make(place: str) -> None:
        if not thing.built:
            raise CheckpointMismatch(
                f"The Keras model {place!r} has no variables yet to restore into. Build it first: "
                "call `model.build(input_shape)`, or the model with a batch."
            )
        if optimizer is not None and not optimizer.built:
            with _scope_of(thing.trainable_variables):
                optimizer.build(thing.trainable_variables)

    return ObjectEntries(entries, make=make)


# Restored values for slots that an optimizer has not created yet.
_waiting: weakref.WeakKeyDictionary[object, Deferred] = weakref.WeakKeyDictionary()


def _list_optimizer_entries(optimizer: Any) -> ObjectEntries:
    entries = _by_position(optimizer.variables)
    if optimizer.built:
        return ObjectEntries(entries)
    if type(optimizer).variables is not sys.modules["keras"].optimizers.Optimizer.variables:
        # It wraps other optimizers: building it changes the order of its variables.
        return ObjectEntries(entries, make=_refuse_unbuilt_optimizer)

    def defer(deferred: Deferred) -> None:
        if optimizer not in _waiting:
            _fill_when_built(optimizer)
        _waiting[optimizer] = deferred

    waiting = _waiting.get(optimizer)
    return ObjectEntries(entries, defer, {} if waiting is None else waiting.waiting)


def _fill_when_built(optimizer: Any) -> None:
    """Make an optimizer fill its slots with the restored values as soon as it creates them."""
    build = optimizer.build

    @functools.wraps(build)
    def build_and_fill(variables: Any) -> None:
        # Imported here, because it imports Keras.
        from replicax.integrations.keras._scope import outside_of_functions

        with outside_of_functions():  # otherwise the slots would have no values at first
            build(variables)
        deferred = _waiting[optimizer]
        restored = [
            (entry, deferred.take(name, entry.shape, entry.dtype))
            for name, entry in _by_position(optimizer.variables).items()
            if name not in before
        ]
        # Written immediately, even during tracing: slots start with concrete values.
        with _context.entered(_context.Frame()), jax.ensure_compile_time_eval():
            for entry, value in restored:
                if value is not None:
                    entry.write(value)
        deferred.finish()
        del _waiting[optimizer], optimizer.build

    before = _by_position(optimizer.variables).keys()
    optimizer.build = build_and_fill


def _refuse_unbuilt_optimizer(place: str) -> None:
    raise CheckpointMismatch(
        f"The Keras optimizer {place!r} has no slots yet to restore into. Make them first: call "
        "`optimizer.build(model.trainable_variables)`, in the strategy's scope."
    )


def _scope_of(variables: Iterable[object]) -> Any:
    """Return the scope of the strategy that the variables belong to, if there is one."""
    for variable in variables:
        ours = _bridges.variable_of(variable)
        if isinstance(ours, Variable) and isinstance(ours.strategy, Strategy):
            return ours.strategy.scope()
    return nullcontext()


def _entry(variable: Any, optional: bool = False) -> ArrayEntry:
    return ArrayEntry(
        tuple(variable.shape),
        jnp.dtype(variable.dtype),
        lambda: _value_of(variable),
        # Assigned through our variable, so that it reaches all devices of its strategy.
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
) -> dict[str, ArrayEntry]:
    """Name variables by their paths, numbered as in a fresh process.

    Keras counts the layers of each class across all models of a process: `dense_7` of the second
    model corresponds to `dense_3` of the first. Names given by the user are kept.

    Args:
      variables: The variables.
      named: The objects that the variables may belong to, whose names appear in the paths.
      optional: Whether the variables may be missing from a checkpoint.
    """
    variables = list(variables)
    bases = {
        thing.name: base
        for thing in (*named, *variables)
        for base in [_automatic_base(thing.name, _snake_case(type(thing).__name__))]
        if base is not None
    }
    numbers: dict[str, dict[str, int]] = {}
    entries: dict[str, ArrayEntry] = {}
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
        while name in entries:  # the user gave several variables the same name
            count += 1
            name = f"{unnumbered}#{count}"
        entries[name] = _entry(variable, optional)
    return entries


def _automatic_base(name: str, class_name: str) -> str | None:
    """Return the name without Keras' number, or None if it is not derived from the class.

    `Bidirectional` adds a prefix to the name of its layer.
    """
    matched = re.fullmatch(rf"((?:forward_|backward_)?{re.escape(class_name)})(_\d+)?", name)
    return matched and matched[1]


def _snake_case(name: str) -> str:
    """Convert a class name as `keras.src.utils.naming.to_snake_case` does."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _by_position(variables: Iterable[Any]) -> dict[str, ArrayEntry]:
    """Name slots by position and purpose, as their paths contain those of trained variables."""
    return {
        f"{position}_{variable.path.rpartition('_')[2].rpartition('/')[2]}": _entry(variable)
        for position, variable in enumerate(variables)
    }


KERAS = TypeHandler(_recognise, _list_entries)
