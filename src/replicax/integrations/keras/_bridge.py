"""What the rest of the library asks of Keras."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import keras

from replicax import _bridges, _context
from replicax.integrations.keras import _hooks
from replicax.integrations.keras._scope import ownership, surround
from replicax.integrations.keras._variables import adopted
from replicax.variables import Variable


def bridge() -> _bridges.Bridge:
    """The bridge, once Keras has been told of us."""
    _hooks.install()
    return _Keras() if keras.backend.backend() == "jax" else _OtherBackend()


@final
class _Keras:
    def __init__(self) -> None:
        self._thread = threading.local()  # as what Keras has set is the thread's

    def follow(self) -> None:
        in_scope = _context.current().strategy is not None
        ours = keras.distribution.distribution() is ownership()
        if in_scope and not ours:
            self._thread.before = keras.distribution.distribution()
            keras.distribution.set_distribution(ownership())
        elif ours and not in_scope:
            keras.distribution.set_distribution(self._thread.before)

    def surround(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return surround(fn)

    def away(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def variable(self, value: Any) -> Variable | None:
        return adopted(value) if isinstance(value, keras.Variable) else None

    def fingerprint(
        self, fn: Callable[..., Any], leaves: Sequence[Any], memory: dict[Any, Any]
    ) -> None:
        pass

    def examine(self, constants: Sequence[Any], variables: Sequence[Variable]) -> None:
        pass


@final
class _OtherBackend:
    """Keras on another backend is left alone, until a model is made in a scope."""

    def follow(self) -> None:
        pass

    def surround(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    def away(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def variable(self, value: Any) -> Variable | None:
        if isinstance(value, keras.Variable):
            _hooks.require_jax()
        return None

    def fingerprint(
        self, fn: Callable[..., Any], leaves: Sequence[Any], memory: dict[Any, Any]
    ) -> None:
        pass

    def examine(self, constants: Sequence[Any], variables: Sequence[Variable]) -> None:
        pass
