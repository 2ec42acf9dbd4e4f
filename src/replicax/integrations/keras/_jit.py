"""The choice of which models to compile: Keras' rule is for TensorFlow; on JAX, tracing decides."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from replicax.integrations.keras._patches import Patches
from replicax.integrations.keras._private import layers_of
from replicax.integrations.keras._records import records


def install(patches: Patches) -> None:
    """Wrap the methods that determine whether a model is compiled."""
    for name, wrapped in (("compile", _noting), ("compile_from_config", _forgetting)):
        # Each is wrapped in the class that defines it: when Keras loads a model, it compares the
        # class's `compile` with that of the defining class to detect an override.
        owner: Any = next(kind for kind in keras.Model.__mro__ if name in vars(kind))
        patches.replace(owner, name, wrapped)


def is_compiled(model: keras.Model) -> bool:
    """Return whether the steps of a model should be compiled, if JAX can trace them."""
    record = records.known(model)
    if model.run_eagerly or (record is not None and record.eager_by_choice):
        return False
    return bool(model.jit_compile or refused_layers(model))


def refused_layers(model: keras.Model) -> list[Any]:
    """Return the layers that keep Keras from compiling a model.

    Most have `supports_jit=False` because XLA lacks some of their operations in TensorFlow. On JAX,
    RandomRotation, RandomZoom, RandomTranslation, RandomShear and RandomPerspective can be traced.
    """
    return [layer for layer in layers_of(model) if not layer.supports_jit]


def _noting(compile: Callable[..., object]) -> Callable[..., object]:
    """Note which models were given `jit_compile=False`; afterwards, "auto" looks the same."""
    signature = inspect.signature(compile)

    @functools.wraps(compile)
    def noted(self: keras.Model, *args: object, **kwargs: object) -> object:
        result = compile(self, *args, **kwargs)
        asked = signature.bind(self, *args, **kwargs).arguments.get("jit_compile", "auto")
        records.model(self).eager_by_choice = not asked
        return result

    return noted


def _forgetting(compile_from_config: Callable[..., object]) -> Callable[..., object]:
    """Ignore the setting in a file, which may not be the user's: Keras saves a resolved "auto"."""

    @functools.wraps(compile_from_config)
    def forgotten(self: keras.Model, config: object) -> Any:
        result = compile_from_config(self, config)
        records.model(self).eager_by_choice = False
        return result

    return forgotten
