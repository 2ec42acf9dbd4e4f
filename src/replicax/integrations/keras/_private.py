"""The private parts of Keras that we need. Tested with Keras 3.15.1."""

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

from replicax._typing import Nest
from replicax.integrations.keras._patches import Patches

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
# `DataAdapter` is used because `fit` takes an instance of it as is, while the public
# `keras.utils.PyDataset` must know its length and goes through a queue.


def get_array(variable: Any) -> jax.Array:
    """Return the array of a variable; `variable.value` would ask a `StatelessScope` for it."""
    return variable._value


def set_array(variable: Any, array: jax.Array) -> None:
    """Replace the array of a variable. `variable.assign` would leave that to a `StatelessScope`."""
    variable._value = array


def layers_of(model: keras.Model) -> list[Any]:
    """Return a model and all layers within it; `model.layers` has only the outermost ones."""
    return list(model._flatten_layers())


def current_scope() -> keras.StatelessScope | None:
    """Return the `StatelessScope` that is open in this thread."""
    return get_stateless_scope()


def global_generator() -> object:
    """Return this thread's generator of unseeded random numbers, for all replicas to share.

    Keras has one per thread, so replicas that run in threads would each have their own. None is
    returned where Keras refuses such numbers because JAX is tracing.
    """
    drawn_so_far = random.getstate()
    try:
        return seed_generator.global_seed_generator()
    except ValueError:
        return None
    finally:
        random.setstate(drawn_so_far)  # otherwise later layers would get other initial values


def set_global_generator(generator: object) -> None:
    global_state.set_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR, generator)


def begin_at(model: keras.Model, epoch: int | None) -> None:
    """Make `fit` begin with a given epoch, as Keras' own backup callback does.

    With None or 0, `fit` begins with its argument `initial_epoch`.
    """
    model._initial_epoch = epoch


def replace_moments(patches: Patches, layer: type, replacement: Callable[..., Any]) -> None:
    """Compute the statistics of synchronized layers with `replacement`.

    It gets the method that it replaces, and that method's arguments. A private method is
    replaced because the layer's `call` does everything else too, and Keras' public `moments` does
    not know the layer.
    """

    def replaced(moments: Callable[..., Any]) -> Callable[..., object]:
        @functools.wraps(moments)
        def _moments(self: Any, inputs: Nest, mask: Any) -> object:
            if self.synchronized:
                return replacement(moments, self, inputs, mask)
            return moments(self, inputs, mask)

        return _moments

    patches.replace(layer, "_moments", replaced)


def replace_saves(patches: Patches, callback: type, replacement: Callable[..., object]) -> None:
    """Route the saves of a Keras callback through `replacement`.

    It gets the method that it replaces, and that method's arguments. A private method is
    replaced because those that Keras documents also decide when to save.
    """

    def replaced(save: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(save)
        def _save_model(self: object, *args: object, **kwargs: object) -> object:
            return replacement(save, self, *args, **kwargs)

        return _save_model

    patches.replace(callback, "_save_model", replaced)


def first_epoch(model: keras.Model) -> int | None:
    """Return the epoch with which a callback makes `fit` begin, if one does."""
    return model._initial_epoch
