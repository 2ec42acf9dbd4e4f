"""Which models are compiled. Keras answers that for TensorFlow; on JAX, the trace answers it."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import keras

from replicax.integrations.keras._private import layers_of

_eager_by_choice: weakref.WeakSet[keras.Model] = weakref.WeakSet()


def install() -> None:
    """Wrap the methods that say whether a model is to be compiled."""
    for name, wrapped in (("compile", _noting), ("compile_from_config", _forgetting)):
        # In the class that defines it: Keras compares `Model.compile` with it when it loads a
        # model, to see whether a subclass has one of its own.
        owner: Any = next(kind for kind in keras.Model.__mro__ if name in vars(kind))
        setattr(owner, name, wrapped(getattr(owner, name)))


def is_compiled(model: keras.Model) -> bool:
    """Return whether the steps of a model are to be compiled, should they trace."""
    if model.run_eagerly or model in _eager_by_choice:
        return False
    return bool(model.jit_compile or refused_layers(model))


def refused_layers(model: keras.Model) -> list[Any]:
    """Return the layers because of which Keras does not compile a model.

    Most have `supports_jit=False` for operations that XLA lacks in TensorFlow. On JAX these layers
    trace: RandomRotation, RandomZoom, RandomTranslation, RandomShear and RandomPerspective do.
    """
    return [layer for layer in layers_of(model) if not layer.supports_jit]


def _noting(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Note who has asked for `jit_compile=False`; afterwards, "auto" looks the same."""
    signature = inspect.signature(compile)

    @functools.wraps(compile)
    def noted(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        result = compile(self, *args, **kwargs)
        asked = signature.bind(self, *args, **kwargs).arguments.get("jit_compile", "auto")
        (_eager_by_choice.discard if asked else _eager_by_choice.add)(self)
        return result

    return noted


def _forgetting(compile_from_config: Callable[..., Any]) -> Callable[..., Any]:
    """Take nothing in a file for the choice of a user: Keras saves what "auto" came to."""

    @functools.wraps(compile_from_config)
    def forgotten(self: keras.Model, config: Any) -> Any:
        result = compile_from_config(self, config)
        _eager_by_choice.discard(self)
        return result

    return forgotten
