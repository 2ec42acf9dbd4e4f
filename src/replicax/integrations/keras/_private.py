"""What Keras has no public way for. Tested with Keras 3.15.1."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.random import seed_generator
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

__all__ = [
    "DataAdapter",
    "begin_at",
    "current_scope",
    "first_epoch",
    "get_array",
    "global_generator",
    "layers_of",
    "replace_moments",
    "replace_saves",
    "set_array",
    "set_global_generator",
]
# `DataAdapter`: `fit` takes an instance of it as it is, while the public `keras.utils.PyDataset`
# has to know how long it is, and goes through a queue.


def get_array(variable: Any) -> jax.Array:
    """The array of a variable. `variable.value` gives what a `StatelessScope` has instead."""
    return variable._value


def set_array(variable: Any, array: jax.Array) -> None:
    """Replaces it. `variable.assign` would leave it to a `StatelessScope`."""
    variable._value = array


def layers_of(model: keras.Model) -> list[Any]:
    """Return a model and all layers within it; `model.layers` are the outermost ones."""
    return list(model._flatten_layers())


def current_scope() -> keras.StatelessScope | None:
    """The `StatelessScope` that is open in this thread."""
    return get_stateless_scope()


def global_generator() -> Any:
    """The generator of this thread for random numbers without a seed, which Keras then shares.

    Why: Keras has one a thread, and replicas that run in threads would have one each. None where
    Keras refuses such numbers, because JAX traces.
    """
    drawn_so_far = random.getstate()
    try:
        return seed_generator.global_seed_generator()
    except ValueError:
        return None
    finally:
        random.setstate(drawn_so_far)  # or layers made later would begin with other numbers


def set_global_generator(generator: Any) -> None:
    global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, generator)


def begin_at(model: keras.Model, epoch: int | None) -> None:
    """Has `fit` begin with an epoch; Keras' own callback for backups does it like this.

    None, or 0, and `fit` begins where its argument says.
    """
    model._initial_epoch = epoch


def replace_moments(layer: type, replacement: Callable[..., Any]) -> None:
    """Have the statistics of synchronized layers computed by `replacement`.

    It gets the method that it replaces, and that method's arguments. Why: `call` of the layer does
    everything else as well, and Keras' public `moments` does not know the layer.
    """
    moments = layer._moments  # pyright: ignore[reportAttributeAccessIssue]

    @functools.wraps(moments)
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        if self.synchronized:
            return replacement(moments, self, inputs, mask)
        return moments(self, inputs, mask)

    setattr(layer, "_moments", _moments)  # noqa: B010  the type does not declare it


def replace_saves(callback: type, replacement: Callable[..., Any]) -> None:
    """Have what a callback of Keras saves be saved by `replacement`.

    It gets the method that it replaces, and that method's arguments. Why: the methods that Keras
    documents decide when to save, and save, in one.
    """
    save = callback._save_model  # pyright: ignore[reportAttributeAccessIssue]

    @functools.wraps(save)
    def _save_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(save, self, *args, **kwargs)

    setattr(callback, "_save_model", _save_model)  # noqa: B010  the type does not declare it


def first_epoch(model: keras.Model) -> int | None:
    """Return the epoch with which a callback has `fit` begin, if one does."""
    return model._initial_epoch
