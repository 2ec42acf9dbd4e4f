"""The bridge between Keras and the rest of the library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import keras

from replicax import _bridges
from replicax._bridges import Memory
from replicax.integrations.keras import _hooks, _jit, _normalization, _writing
from replicax.integrations.keras._patches import Patches
from replicax.integrations.keras._scope import follow, owner_in_use, surround
from replicax.integrations.keras._variables import adopted
from replicax.variables import Variable


def bridge() -> _bridges.Bridge:
    """Patch Keras, and return the bridge."""
    patches = Patches()
    _hooks.install(patches)
    if keras.backend.backend() != "jax":
        return _OtherBackend(patches)
    for part in (_jit, _normalization, _writing):
        part.install(patches)
    return _Keras(patches)


def uninstall() -> None:
    """Undo the patches of Keras until the next scope or `rx.function`; call it outside scopes."""
    known = _bridges.take_back("keras")
    if isinstance(known, (_Keras, _OtherBackend)):
        known.patches.undo()


@final
class _Keras:
    def __init__(self, patches: Patches) -> None:
        self.patches = patches

    def follow(self) -> None:
        follow()

    def surround(self, fn: Callable[..., object]) -> Callable[..., object]:
        return surround(fn)

    def suspended(self) -> AbstractContextManager[object]:
        return nullcontext()

    def variable(self, value: Any) -> Variable | None:
        return adopted(value, owner_in_use()) if isinstance(value, keras.Variable) else None

    def fingerprint(
        self, fn: Callable[..., object], leaves: Sequence[object], memory: Memory
    ) -> None:
        pass

    def examine(self, constants: Sequence[object], variables: Sequence[Variable]) -> None:
        pass


@final
class _OtherBackend:
    """The bridge to Keras on another backend, left alone until a model is created in a scope."""

    def __init__(self, patches: Patches) -> None:
        self.patches = patches

    def follow(self) -> None:
        pass

    def surround(self, fn: Callable[..., object]) -> Callable[..., object]:
        return fn

    def suspended(self) -> AbstractContextManager[object]:
        return nullcontext()

    def variable(self, value: Any) -> Variable | None:
        if isinstance(value, keras.Variable):
            _hooks.require_jax()
        return None

    def fingerprint(
        self, fn: Callable[..., object], leaves: Sequence[object], memory: Memory
    ) -> None:
        pass

    def examine(self, constants: Sequence[object], variables: Sequence[Variable]) -> None:
        pass
