"""How Keras' variables are found: those that are made, and those that a function uses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

import jax
import keras

from replicax import _context
from replicax.integrations.keras._private import current_scope, get_array
from replicax.integrations.keras._variables import adopted, belongs_to
from replicax.variables import write


@final
class Ownership(keras.distribution.DataParallel):
    """Notes which strategy's scope Keras variables are made in; lays out nothing.

    Keras asks it for the layout of every variable that is made while it is set. (The base class
    `Distribution` is not public; of this one, nothing is used.)
    """

    def __init__(self) -> None:
        super().__init__(devices=keras.distribution.list_devices()[:1], auto_shard_dataset=False)

    def get_variable_layout(self, variable: keras.Variable) -> None:
        strategy = _context.current().strategy
        if strategy is not None:
            belongs_to(variable, strategy)

    def get_tensor_layout(self, path: str) -> None:
        return None


@functools.cache
def ownership() -> Ownership:
    """The one that there is: it has no state."""
    return Ownership()


@final
class VariablesInUse(keras.StatelessScope):
    """Has reads and writes of Keras variables follow our rules, while a function runs.

    A program that is traced finds them, replicas see their own, and a differentiated function can
    be differentiated with respect to them.
    """

    def get_current_value(self, variable: keras.Variable) -> jax.Array:
        if get_array(variable) is None:
            self._initialize()
        return adopted(variable).value

    def add_update(self, update: tuple[keras.Variable, jax.Array]) -> None:
        variable, value = update
        if get_array(variable) is None:
            self._initialize()
        write(adopted(variable), value)

    def _initialize(self) -> None:
        """Keras puts off the numbers of variables made in here until the scope is left.

        That is right when shapes are inferred. Here, it may be a slot that the function needs.
        """
        with jax.ensure_compile_time_eval():
            self.__exit__()
        self.__enter__()


def surround(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, with Keras variables that follow our rules."""

    @functools.wraps(fn)
    def surrounded(*args: Any, **kwargs: Any) -> Any:
        if current_scope() is not None:  # ours, or Keras infers shapes or is stateless itself
            return fn(*args, **kwargs)
        with ownership().scope(), VariablesInUse():
            return fn(*args, **kwargs)

    return surrounded
