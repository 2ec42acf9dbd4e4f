"""What a running function sees and leaves behind of the variables: both are parts of a frame."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final

import jax

from replicax._context import Frame

if TYPE_CHECKING:
    from replicax.variables._variable import Variable

# Held from when states are given to a program that reuses their memory until they are replaced, so
# that no other thread takes one in between.
reusing_states = threading.RLock()


@final
class Overlay:
    """Values that variables have for one function call only, such as a differentiated one.

    Reads find them first, writes stay here until the function has returned: inside, values may be
    tracers, which must not end up in a variable.
    """

    __slots__ = ("_differentiated", "_outer", "_values", "_written")

    def __init__(self, values: dict[Variable, jax.Array], outer: Overlay | None) -> None:
        self._differentiated = dict(values)
        self._values = values
        self._outer = outer
        self._written: dict[Variable, None] = {}  # a set that keeps the order

    def find(self, variable: Variable) -> jax.Array | None:
        found = self._values.get(variable)
        if found is None and self._outer is not None:
            return self._outer.find(variable)
        return found

    def assign(self, variable: Variable, value: jax.Array) -> None:
        """A write by the function. It is constant for the gradient, as with a gradient tape.

        A variable that is differentiated stays so: its reads lead back to it, whatever its value.
        """
        value = jax.lax.stop_gradient(value)
        leaf = self._differentiated.get(variable)
        if leaf is not None:
            value = value + (leaf - jax.lax.stop_gradient(leaf))
        self.write(variable, value)

    def write(self, variable: Variable, value: jax.Array) -> None:
        self._values[variable] = value
        self._written[variable] = None

    def written(self) -> dict[Variable, jax.Array]:
        return {variable: self._values[variable] for variable in self._written}


@final
class Transaction:
    """Remembers what variables were before their first write, to put it back on failure.

    States are immutable, so remembering one is keeping a reference.
    """

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before: dict[Variable, Any] = {}

    def remember(self, variable: Variable, state: Any) -> None:
        self._before.setdefault(variable, state)

    @property
    def written(self) -> list[Variable]:
        return list(self._before)

    def include(self, inner: Transaction) -> None:
        """Takes over what a part of this transaction that has succeeded would put back."""
        for variable, state in inner._before.items():
            self.remember(variable, state)

    def roll_back(self) -> None:
        for variable, state in self._before.items():
            variable.restore_state(state)


@contextmanager
def all_or_nothing(frame: Frame) -> Iterator[Frame]:
    """A frame for a function whose failure leaves every variable as it was."""
    transaction = Transaction()
    try:
        yield replace(frame, transaction=transaction)
    except BaseException:
        transaction.roll_back()
        raise
    if frame.transaction is not None:
        frame.transaction.include(transaction)
