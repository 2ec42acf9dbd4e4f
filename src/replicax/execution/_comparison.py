"""Comparing what a compiled function left behind with what the eager one did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _nest
from replicax._typing import Nest
from replicax.values import DistributedValues
from replicax.variables import Variable

# Of the distance from 1 to the next number that a dtype has. The two executions add in different
# orders; this exponent gives 4e-10 for float64, 7e-5 for float32, 0.016 for float16 and 0.054 for
# bfloat16.
_EXPONENT = 0.6
_MOST_SHOWN = 20

_Copies = tuple[np.ndarray, ...]  # one for each local replica, or the one there is


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """An output or a variable that is not the same compiled and eager.

    Args:
      name: Which one, such as `output['loss']` or `variable 'weight'`, and whose, if replicas have
        their own.
      dtype: The dtype of its elements.
      largest: The largest difference between two elements.
      bound: The largest that rounding explains, by the dtype and the largest element.
      reason: What differs, if it is not the numbers: shapes, dtypes, the structure of outputs.
    """

    name: str
    dtype: str
    largest: float
    bound: float
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return f"{self.name} {self.reason}"
        return (
            f"{self.name} differs by {self.largest:.3g}; rounding explains {self.bound:.3g} in "
            f"{self.dtype}"
        )


@final
@dataclass(frozen=True, slots=True)
class AuditReport:
    """The outcome of an audit.

    Args:
      function: The name of the function.
      compared: How many arrays were compared.
      differences: What was not the same, on any worker.
      result: What the compiled function returned.
    """

    function: str
    compared: int
    differences: tuple[Difference, ...]
    result: Nest

    @property
    def ok(self) -> bool:
        """Whether everything was the same, but for rounding."""
        return not self.differences

    def __str__(self) -> str:
        if self.ok:
            return f"`{self.function}`: compiled and eager agree on {self.compared} arrays"
        shown = [str(difference) for difference in self.differences[:_MOST_SHOWN]]
        if more := len(self.differences) - len(shown):
            shown.append(f"and {more} more")
        return (
            f"`{self.function}`: compiled and eager differ in {len(self.differences)} of "
            f"{self.compared} arrays:\n  " + "\n  ".join(shown) + "\nThe state is that of the "
            "compiled function. If the difference is more than rounding can explain, run "
            "`replicax doctor`, which knows versions of jaxlib that compute wrong numbers."
        )


@final
class Comparison:
    """Collects what differs."""

    def __init__(self, rtol: float | None) -> None:
        self._rtol = rtol
        self.compared = 0
        self.differences: list[Difference] = []

    def outputs(self, compiled: Nest, eager: Nest) -> None:
        ours, structure = _nest.flatten_with_paths(compiled, handed=True)
        theirs, other = _nest.flatten(eager, handed=True)
        if structure != other:
            reason = f"has the structure {structure} compiled and {other} eagerly"
            self.differences.append(Difference("the output", "", np.inf, 0.0, reason))
            return
        for (path, mine), yours in zip(ours, theirs, strict=True):
            self._arrays(f"output{path}", _components(mine), _components(yours))

    def variable(self, variable: Variable, eager_state: Any) -> None:
        compiled = _copies(variable)
        state = variable.state
        variable.restore_state(eager_state)
        eager = _copies(variable)
        variable.restore_state(state)
        self._arrays(f"variable {variable.name!r}", compiled, eager)

    def _arrays(self, name: str, compiled: _Copies, eager: _Copies) -> None:
        if len(eager) == 1:  # eager replicas that return one object return it as one value
            eager = eager * len(compiled)
        if len(compiled) != len(eager):
            reason = f"has {len(compiled)} component(s) compiled and {len(eager)} eagerly"
            self.differences.append(Difference(name, "", np.inf, 0.0, reason))
            return
        for index, (mine, yours) in enumerate(zip(compiled, eager, strict=True)):
            self.compared += 1
            whose = f"{name} of local replica {index}" if len(compiled) > 1 else name
            difference = compare(whose, mine, yours, self._rtol)
            if difference is not None:
                self.differences.append(difference)


def compare(
    name: str, compiled: np.ndarray, eager: np.ndarray, rtol: float | None
) -> Difference | None:
    """Return how two arrays differ, or None if rounding explains it.

    Numbers that are not floating-point have to be equal. For the others the difference may be
    `rtol` times the largest element: small elements of sums are rounded like the large ones.

    >>> import numpy as np
    >>> from replicax.execution._comparison import compare
    >>> print(compare("loss", np.float32(1.0), np.float32(1.01), None))
    loss differs by 0.01; rounding explains 7.08e-05 in float32
    """
    if (compiled.shape, compiled.dtype) != (eager.shape, eager.dtype):
        mine, yours = (f"{array.dtype}{list(array.shape)}" for array in (compiled, eager))
        reason = f"is {mine} compiled and {yours} eagerly"
        return Difference(name, str(compiled.dtype), np.inf, 0.0, reason)
    inexact = jnp.issubdtype(compiled.dtype, jnp.inexact)
    unequal = compiled != eager
    if inexact:
        unequal &= ~(np.isnan(compiled) & np.isnan(eager))
    if not unequal.any():
        return None
    wide = np.complex128 if np.iscomplexobj(compiled) else np.float64
    mine, yours = compiled.astype(wide), eager.astype(wide)
    with np.errstate(invalid="ignore"):
        apart = np.abs(mine - yours)[unequal]
    largest = float(np.where(np.isfinite(apart), apart, np.inf).max())
    sizes = np.abs([mine, yours])
    scale = float(np.where(np.isfinite(sizes), sizes, 0.0).max())
    bound = _bound(compiled.dtype, scale, rtol) if inexact else 0.0
    if largest <= bound:
        return None
    return Difference(name, str(compiled.dtype), largest, bound)


def _bound(dtype: Any, scale: float, rtol: float | None) -> float:
    """Return the largest difference of numbers up to `scale` that rounding explains."""
    if rtol is not None:
        return rtol * scale
    epsilon = float(jnp.finfo(dtype).eps)
    # What ought to be zero is the rounding error of what it was computed from.
    return max(epsilon**_EXPONENT * scale, epsilon)


def _components(value: Any) -> _Copies:
    """Return the numbers in an output; none for a variable, which is compared by itself."""
    parts = value.values if isinstance(value, DistributedValues) else (value,)
    return tuple(_numbers(part) for part in parts if isinstance(part, _NUMBERS))


def _copies(variable: Variable) -> _Copies:
    return tuple(_numbers(copy.value) for copy in variable.values)


_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


def _numbers(value: Any) -> np.ndarray:
    array = jnp.asarray(value)  # a Python number has the dtype that a program gives it
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)
