"""What the rest of the library asks of Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import keras

from replicax import _bridges
from replicax.integrations.keras import _hooks, _jit, _normalization, _writing
from replicax.integrations.keras._scope import follow, owner_in_use, surround
from replicax.integrations.keras._variables import adopted
from replicax.variables import Variable


def bridge() -> _bridges.Bridge:
    """The bridge, once Keras has been told of us."""
    _hooks.install()
    if keras.backend.backend() != "jax":
        return _OtherBackend()
    for part in (_jit, _normalization, _writing):
        part.install()
    return _Keras()


@final
class _Keras:
    def follow(self) -> None:
        follow()

    def surround(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return surround(fn)

    def away(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def variable(self, value: Any) -> Variable | None:
        return adopted(value, owner_in_use()) if isinstance(value, keras.Variable) else None

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
