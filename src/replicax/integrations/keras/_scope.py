"""Tracking of Keras variables: those that are created, and those that a function uses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import jax
import keras

from replicax import _context
from replicax._typing import Nest
from replicax.integrations.keras._private import (
    current_scope,
    get_array,
    global_generator,
    set_global_generator,
)
from replicax.integrations.keras._records import records
from replicax.integrations.keras._variables import adopted, belongs_to
from replicax.strategies import Strategy
from replicax.variables import write


@final
class Ownership(keras.distribution.DataParallel):
    """A distribution without layouts that records in which strategy's scope variables are created.

    Keras asks it for the layout of every variable that is created while it is set. (The base class
    `Distribution` is not public; nothing of `DataParallel` is used.)
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
    """Return the only instance: it has no state."""
    return Ownership()


def follow() -> None:
    """Set our distribution if a strategy is current, and restore the previous one otherwise."""
    in_scope = _context.current().strategy is not None
    ours = keras.distribution.distribution() is ownership()
    if in_scope and not ours:
        records.thread.before = keras.distribution.distribution()
        keras.distribution.set_distribution(ownership())
    elif ours and not in_scope:
        keras.distribution.set_distribution(records.thread.before)


def users_distribution() -> object:
    """Return the distribution that Keras would have if we had set none."""
    current = keras.distribution.distribution()
    return getattr(records.thread, "before", None) if current is ownership() else current


@contextmanager
def distributed_by(distribution: Any) -> Iterator[None]:
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(distribution)
    try:
        yield
    finally:
        keras.distribution.set_distribution(before)


@final
class VariablesInUse(keras.StatelessScope):
    """A scope in which reads and writes of Keras variables follow our rules while a function runs.

    A traced program finds the variables, each replica sees its own values, and a function can be
    differentiated with respect to them.

    Variables without a strategy get `owner`, which is set while a step of `fit` runs: the step
    computes outside of the strategy, but variables that it creates are kept on all devices.
    """

    owner: Strategy | None = None

    def get_current_value(self, variable: keras.Variable) -> jax.Array:
        if get_array(variable) is None:
            self._initialize()
        return adopted(variable, self.owner).value

    def add_update(self, update: tuple[keras.Variable, jax.Array]) -> None:
        variable, value = update
        if get_array(variable) is None:
            self._initialize()
        write(adopted(variable, self.owner), value)

    def _initialize(self) -> None:
        """Initialize the variables that Keras would leave without values until the scope ends.

        Keras is right to do so when it infers shapes. Here, a variable may be a slot that the
        function needs.
        """
        with self.put_aside():
            pass

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """Let Keras create variables with concrete values."""
        with jax.ensure_compile_time_eval():
            self.__exit__()
            try:
                yield
            finally:
                self.__enter__()


@contextmanager
def owned_by(strategy: Strategy) -> Iterator[None]:
    """Give variables without a strategy this one, inside a surrounded function."""
    scope = current_scope()
    assert isinstance(scope, VariablesInUse)
    scope.owner = strategy
    try:
        yield
    finally:
        scope.owner = None


def owner_in_use() -> Strategy | None:
    """Return the strategy that variables without one get in the current function."""
    scope = current_scope()
    return scope.owner if isinstance(scope, VariablesInUse) else None


def outside_of_functions() -> AbstractContextManager[None]:
    """Return a context in which a function that uses variables can create others."""
    scope = current_scope()
    return scope.put_aside() if isinstance(scope, VariablesInUse) else nullcontext()


def surround(fn: Callable[..., Nest]) -> Callable[..., object]:
    """Return `fn` wrapped so that Keras variables follow our rules in it."""
    with distributed_by(None):  # so that the generator has no owner
        generator = None if _context.current().program is not None else global_generator()

    @functools.wraps(fn)
    def surrounded(*args: Nest, **kwargs: Nest) -> Any:
        if current_scope() is not None:  # ours, or Keras' own for shape inference and the like
            return fn(*args, **kwargs)
        if generator is not None:
            set_global_generator(generator)
        with distributed_by(ownership()), VariablesInUse():
            return fn(*args, **kwargs)

    return surrounded
