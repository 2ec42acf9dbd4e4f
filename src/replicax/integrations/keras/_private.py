"""What Keras has no public way for. Tested with Keras 3.15.1."""

from __future__ import annotations

from typing import Any

import jax
import keras
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

__all__ = ["DataAdapter", "begin_at", "current_scope", "get_array", "set_array"]
# `DataAdapter`: `fit` takes an instance of it as it is, while the public `keras.utils.PyDataset`
# has to know how long it is, and goes through a queue.


def get_array(variable: Any) -> jax.Array:
    """The array of a variable. `variable.value` gives what a `StatelessScope` has instead."""
    return variable._value


def set_array(variable: Any, array: jax.Array) -> None:
    """Replaces it. `variable.assign` would leave it to a `StatelessScope`."""
    variable._value = array


def current_scope() -> keras.StatelessScope | None:
    """The `StatelessScope` that is open in this thread."""
    from keras.src.backend.common.stateless_scope import get_stateless_scope

    return get_stateless_scope()


def begin_at(model: keras.Model, epoch: int | None) -> None:
    """Has `fit` begin with an epoch; Keras' own callback for backups does it like this."""
    model._initial_epoch = epoch
