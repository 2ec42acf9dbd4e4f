"""The states of variables at one level of a program, while it is traced.

A `jax.Ref` can be written anywhere, even in the body of a `lax.scan` or in a function that the user
jits. JAX removes refs when it lowers a program, which means that it traces all of it again: 0.4 s
for 200 variables with Adam. So a state that changes only between such functions, as nearly every
one does, is an ordinary value.
"""

from __future__ import annotations

from typing import final

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from replicax.execution._varying import STATE


@final
class Cell:
    """A state that is read and written by Python, at the level that it belongs to."""

    __slots__ = ("_is_named", "_value")

    def __init__(self, state: jax.Array) -> None:
        self._value = state
        self._is_named = True

    def read(self) -> jax.Array:
        if not self._is_named:
            self._value = checkpoint_name(self._value, STATE)
            self._is_named = True
        return self._value

    def write(self, state: jax.Array) -> None:
        state = jnp.asarray(state)
        if state.weak_type:  # the next call would get an argument of another type
            state = jax.lax.convert_element_type(state, state.dtype)
        self._value = state
        self._is_named = False

    def last(self) -> jax.Array:
        """Return the final state, which is a result of the program."""
        return self._value


@final
class RefCell:
    """A state that may be written wherever it is reached."""

    __slots__ = ("_ref",)

    def __init__(self, state: jax.Array) -> None:
        self._ref = jax.new_ref(state)

    def read(self) -> jax.Array:
        return self._ref[...]

    def write(self, state: jax.Array) -> None:
        self._ref[...] = state

    def last(self) -> jax.Array:
        return self._ref[...]
