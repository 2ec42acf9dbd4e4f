"""The comparison of the effects of a compiled function with those of the eager one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from replicax import _nest
from replicax._typing import Nest
from replicax.errors import InvalidArgument
from replicax.values import DistributedValues

_MOST_SHOWN = 20

_Copies = tuple[np.ndarray, ...]  # one per local replica, or a single one


@final
@dataclass(frozen=True, slots=True)
class Tolerance:
    """A bound on how much numbers may differ.

    Args:
      rtol: Relative to the largest element of an array; None for what rounding explains.
      atol: Absolute, whatever the elements are.
    """

    rtol: float | None = None
    atol: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if value is not None and not value >= 0:  # refuses NaN as well
                raise InvalidArgument(f"`{name}` must be a number from 0 on; got {value!r}.")

    def bound(self, dtype: object, scale: float) -> float:
        """Return the largest difference that is allowed between numbers up to `scale`.

        The two executions add in different orders. The exponent gives 4e-10 for float64, 7e-5 for
        float32, 0.016 for float16 and 0.054 for bfloat16. Numbers that should be zero are rounding
        errors of larger ones, so a `scale` below that relative bound is raised to it.
        """
        usual = float(jnp.finfo(dtype).eps) ** 0.6
        relative = usual * max(scale, usual) if self.rtol is None else self.rtol * scale
        return max(relative, self.atol or 0.0)


@final
@dataclass(frozen=True, slots=True)
class AuditDifference:
    """An output or a variable that differs between compiled and eager execution.

    Args:
      name: Which one, such as `output['loss']` or `variable 'weight'`, and which replica's, if
        replicas have their own.
      dtype: The dtype of its elements.
      largest: The largest difference between two elements.
      bound: The largest difference that rounding explains, given the dtype and the largest element.
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
      compared: The number of arrays that were compared on this worker.
      differences: The outputs and variables that differed, on any worker.
      result: The result of the compiled function.
    """

    function: str
    compared: int
    differences: tuple[AuditDifference, ...]
    result: Nest

    @property
    def ok(self) -> bool:
        """True if everything was the same, apart from rounding."""
        return not self.differences

    def __str__(self) -> str:
        if self.ok:
            return f"`{self.function}`: compiled and eager agree; arrays compared: {self.compared}"
        shown = [str(difference) for difference in self.differences[:_MOST_SHOWN]]
        if more := len(self.differences) - len(shown):
            shown.append(f"and {more} more")
        return (
            f"`{self.function}`: compiled and eager differ; arrays compared: {self.compared}\n  "
            + "\n  ".join(shown)
            + "\nThe state is that of the compiled function. If the difference is more than "
            "rounding can explain, run `replicax doctor`, which knows versions of jaxlib that "
            "compute wrong numbers."
        )


@final
class Comparison:
    """A list of the differences between the outputs and states of two runs."""

    def __init__(self, tolerance: Tolerance) -> None:
        self._tolerance = tolerance
        self.compared = 0
        self.differences: list[AuditDifference] = []

    def outputs(self, compiled: Nest, eager: Nest) -> None:
        """Compare the results of the two executions."""
        ours, structure = _nest.flatten_with_paths(compiled, keep_opaque=True)
        theirs, other = _nest.flatten(eager, keep_opaque=True)
        if structure != other:
            self._add("the output", f"has the structure {structure} compiled and {other} eagerly")
            return
        for (path, mine), yours in zip(ours, theirs, strict=True):
            if isinstance(mine, (str, bytes)) and mine != yours:
                self._add(f"output{path}", "is another text compiled and eagerly")
            elif isinstance(mine, _NUMBERS) or isinstance(yours, _NUMBERS):
                self.states(f"output{path}", mine, yours)

    def states(self, name: str, compiled: object, eager: object) -> None:
        """Compare arrays, or values with an array for each local replica."""
        ours, theirs = _components(compiled), _components(eager)
        # If all eager replicas return the same object, there is only one.
        if len(theirs) == 1 and ours:
            theirs = theirs * len(ours)
        if len(ours) != len(theirs):
            self._add(name, f"has {len(ours)} array(s) compiled and {len(theirs)} eagerly")
            return
        for index, (mine, yours) in enumerate(zip(ours, theirs, strict=True)):
            self.compared += 1
            whose = f"{name} of local replica {index}" if len(ours) > 1 else name
            difference = compare(whose, mine, yours, self._tolerance)
            if difference is not None:
                self.differences.append(difference)

    def _add(self, name: str, reason: str) -> None:
        self.differences.append(AuditDifference(name, "", np.inf, 0.0, reason))


def compare(
    name: str, compiled: np.ndarray, eager: np.ndarray, tolerance: Tolerance
) -> AuditDifference | None:
    """Return how two arrays differ, or None if they agree within the tolerance.

    Numbers that are not floating-point must be equal. For the others the bound is relative to the
    largest element: small elements of sums are rounded like the large ones.

    >>> import numpy as np
    >>> from replicax.execution._comparison import Tolerance, compare
    >>> print(compare("loss", np.float32(1.0), np.float32(1.01), Tolerance()))
    loss differs by 0.01; rounding explains 7.08e-05 in float32
    """
    if (compiled.shape, compiled.dtype) != (eager.shape, eager.dtype):
        mine, yours = (f"{array.dtype}{list(array.shape)}" for array in (compiled, eager))
        reason = f"is {mine} compiled and {yours} eagerly"
        return AuditDifference(name, str(compiled.dtype), np.inf, 0.0, reason)
    inexact = jnp.issubdtype(compiled.dtype, jnp.inexact)
    unequal = compiled != eager
    if inexact:
        unequal &= ~(np.isnan(compiled) & np.isnan(eager))
    if not unequal.any():
        return None
    wide = np.complex128 if np.iscomplexobj(compiled) else np.float64
    mine, yours = compiled.astype(wide), eager.astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(mine - yours)[unequal]
    largest = float(np.where(np.isfinite(apart), apart, np.inf).max())
    sizes = np.abs([mine, yours])
    scale = float(np.where(np.isfinite(sizes), sizes, 0.0).max())
    bound = tolerance.bound(compiled.dtype, scale) if inexact else 0.0
    if inexact and largest <= bound:
        return None
    return AuditDifference(name, str(compiled.dtype), largest, bound)


def _components(value: object) -> _Copies:
    parts = value.values if isinstance(value, DistributedValues) else (value,)
    return tuple(_array(part) for part in parts if isinstance(part, _NUMBERS))


_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, DistributedValues)


def _array(value: object) -> np.ndarray:
    try:
        array = jnp.asarray(value)  # a Python number gets the dtype that a program gives it
    except OverflowError:  # No program can hold such a number.
        return np.asarray(value)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)
