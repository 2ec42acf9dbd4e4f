"""Values in place of `jax.Ref`s, in code that is computed equation by equation."""

from __future__ import annotations

from typing import Any, final

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

# The number of operands that reads and writes of a whole ref have.
_WHOLE = {"get": 1, "swap": 2}


@final
class RefValue:
    """The value of a `jax.Ref`, for as long as it is read and written as a whole."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._ref: object = None

    @property
    def whole(self) -> bool:
        return self._ref is None

    def ref(self) -> object:
        """Turn the value into a real ref, for equations that access parts of it or have a body."""
        if self._ref is None:
            self._ref = jax.new_ref(jnp.asarray(self.value))
        return self._ref


def on_ref_values(equation: Any, operands: list[Any]) -> list[Any] | None:
    """Apply an equation to values of refs, if it does not need real refs; otherwise return None."""
    name = equation.primitive.name
    if name == "new_ref":
        return [RefValue(_array(equation.invars[0], operands[0]))]
    target = operands[0] if operands else None
    if not isinstance(target, RefValue) or not target.whole or len(operands) != _WHOLE.get(name):
        return None
    aval = equation.outvars[0].aval
    if (aval.shape, aval.dtype) != (target.value.shape, target.value.dtype):
        return None
    before = target.value
    if name == "swap":
        target.value = _array(equation.invars[1], operands[1])
    return [before]


def _array(variable: Any, value: Any) -> Any:
    dtype = variable.aval.dtype
    return jnp.asarray(value, dtype) if isinstance(variable, Literal) else value


def unpacked(operand: object) -> Any:
    return operand.ref() if isinstance(operand, RefValue) else operand
