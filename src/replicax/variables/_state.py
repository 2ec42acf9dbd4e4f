"""The state of a variable in the current context: overlays and transactions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, final

import jax

from replicax import _context
from replicax._context import Frame
from replicax._typing import State

if TYPE_CHECKING:
    from replicax.variables._storage import Storage
    from replicax.variables._variable import Variable

Result = TypeVar("Result")

# This lock is held from when states are passed to a program that reuses their memory until they
# are replaced, so that no other thread takes one in between.
reusing_states = threading.RLock()


def state_of(variable: Variable) -> State:
    """Return the state of a variable: the stored one, or that in the program being traced."""
    program = _context.current().program
    if program is not None:
        return program.state_of(variable)
    storage = variable._storage
    with reusing_states:
        storage.exclusive = False  # the caller may keep a reference
        return storage.stored


def set_state(variable: Variable, state: State) -> None:
    """Change the state of a variable; undone if the running function fails."""
    frame = _context.current()
    if frame.program is not None:
        if frame.transaction is not None:
            frame.transaction.remember(variable, frame.program.state_of(variable))
        frame.program.set_state_of(variable, state)
        return
    if frame.transaction is not None:
        frame.transaction.remember(variable, variable._storage.stored)
    variable._storage.store(state)


def restore_state(variable: Variable, state: object) -> None:
    """Put a state back, bypassing every transaction."""
    program = _context.current().program
    if program is not None:
        program.set_state_of(variable, state)
    else:
        variable._storage.store(state)


@final
class Overlay:
    """Values that variables have for one function call only, such as a differentiated one.

    Reads find them first, and writes stay here until the function has returned: inside, values may
    be tracers, which must not end up in a variable.
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
        """Note a write by the function. It is constant for the gradient, as with a gradient tape.

        A differentiated variable remains so: its reads depend on it, whatever its new value.
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
    """The states of variables before their first write, to be put back on failure.

    States are immutable, so keeping a reference preserves one.
    """

    __slots__ = ("_before", "_shared")

    def __init__(self) -> None:
        self._before: dict[Variable, State] = {}
        self._shared: dict[Storage, tuple[State, Any]] = {}

    def shared(self, storage: Storage, state: Any, make: Callable[[Any], Result]) -> Result:
        """Return `make(state)`, computed once for all replicas that read the same state."""
        known = self._shared.get(storage)
        if known is None or known[0] is not state:
            known = self._shared[storage] = state, make(state)
        return known[1]

    def remember(self, variable: Variable, state: object) -> None:
        self._before.setdefault(variable, state)

    @property
    def written(self) -> list[Variable]:
        return list(self._before)

    def include(self, inner: Transaction) -> None:
        """Take over the old states of a nested transaction that has succeeded."""
        for variable, state in inner._before.items():
            self.remember(variable, state)

    def roll_back(self) -> None:
        for variable, state in self._before.items():
            restore_state(variable, state)


@contextmanager
def all_or_nothing(frame: Frame) -> Iterator[Frame]:
    """Yield a frame for a function whose failure leaves every variable as it was."""
    transaction = Transaction()
    try:
        yield replace(frame, transaction=transaction)
    except BaseException:
        transaction.roll_back()
        raise
    if frame.transaction is not None:
        frame.transaction.include(transaction)
