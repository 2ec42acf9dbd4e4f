"""Replicas whose shapes differ, in one program.

Replicas with the same shapes are of one *variant*; a batch of 10 rows over 4 replicas has two, of 3
and of 2 rows. The code of a replica is traced once for each variant, on its exact shapes. The
program then computes all variants on every device, side by side: where they communicate, the
operand of the replica's own variant is sent, once, and the result is given to all of them. In the
end the results of the replica's own variant are kept.

The program has no branches, so devices cannot wait for each other in different places. A selection
discards what a device computes for variants that are not its own, so that not even a NaN gets from
one to another.

Variants share equations with the same operands, such as the update of an optimizer by summed
gradients, and these are computed once. That does more than save time. If copies of a mirrored
variable were selected from two computations, they could differ in the last bit, as XLA may compile
the two differently.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from replicax._jax_compat import (
    apply_equation,
    calls_python,
    closed_jaxpr,
    jaxprs_within,
    without_constants,
)
from replicax._typing import Nest
from replicax.execution._cache_key import is_paddable
from replicax.execution._iterator_elements import NotOneProgram
from replicax.execution._ref_values import on_ref_values, unpacked
from replicax.execution._varying import communicates
from replicax.topology import REPLICA_AXIS
from replicax.values import Shape, largest_of

# Each device computes all variants, which pays off only for a few.
_MOST_VARIANTS = 4
# Primitives that do nothing but compute another jaxpr, and the parameter that holds it.
_BODIES = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}

Arrays = list[jax.Array]
_Steps = Generator[tuple[Any, Arrays], Arrays, Arrays]


@final
@dataclass(frozen=True, slots=True)
class Variants:
    """The shapes of each variant's operands, and the variant of each replica."""

    shapes: tuple[tuple[Shape, ...], ...]
    of_replica: tuple[int, ...]

    @classmethod
    def of(cls, shapes: Sequence[Sequence[Shape]], replicas: int) -> Variants:
        """Find the variants, given the shapes of each operand on the replicas."""
        columns = list(zip(*shapes, strict=True)) or [()] * replicas
        distinct = tuple(dict.fromkeys(columns))
        if len(distinct) > _MOST_VARIANTS:
            raise NotOneProgram
        return cls(distinct, tuple(distinct.index(column) for column in columns))

    def __len__(self) -> int:
        return len(self.shapes)

    def of_replicas(self, each: Sequence[object]) -> list[Any]:
        """Return the replicas' values, given those of the variants."""
        return [each[variant] for variant in self.of_replica]


def trace(function: Callable[[Arrays], Arrays], arguments: Arrays) -> ClosedJaxpr:
    """Trace one variant; refuse effects that must not happen for replicas of another one."""
    jaxpr = jax.make_jaxpr(function)(arguments)
    if calls_python(jaxpr):
        raise NotOneProgram
    return jaxpr


def result_shapes(
    jaxprs: Sequence[ClosedJaxpr], may_differ: int
) -> tuple[list[list[Shape]], list[Any]]:
    """Return the shapes of each result in the variants, and the results' dtypes.

    The shapes of the first `may_differ` results may differ between variants.
    """
    results: list[list[Any]] = [
        [variable.aval for variable in without_constants(jaxpr).outvars] for jaxpr in jaxprs
    ]
    if len(set(map(len, results))) > 1:
        raise NotOneProgram
    found: list[list[Shape]] = []
    for number, avals in enumerate(zip(*results, strict=True)):
        shapes = [aval.shape for aval in avals]
        dtypes = [aval.dtype for aval in avals]
        alike = len(set(shapes)) == 1 and len(set(dtypes)) == 1
        if not alike and not (number < may_differ and is_paddable(shapes, dtypes)):
            raise NotOneProgram
        found.append(shapes)
    return found, [aval.dtype for aval in results[0]]


def compute(variants: Variants, jaxprs: Sequence[ClosedJaxpr], arguments: Arrays) -> Arrays:
    """Compute the results of this replica's variant, given the jaxpr of each variant.

    Results whose shapes differ are padded with zeros to the size of the largest.
    """
    own = jnp.asarray(np.asarray(variants.of_replica, np.int32))[jax.lax.axis_index(REPLICA_AXIS)]

    def chosen(cases: Sequence[jax.Array]) -> jax.Array:
        first = cases[0]
        return first if all(c is first for c in cases) else jax.lax.select_n(own, *cases)

    shared = _Shared()
    running = [_evaluate(jaxpr, arguments, shared) for jaxpr in jaxprs]
    results: Arrays | None = None
    while True:
        collectives, ended = _advance(running, results)
        if ended:
            break
        results = _communicate(collectives, chosen)
    return [chosen(_alike(cases)) for cases in zip(*ended, strict=True)]


def _advance(
    running: Sequence[_Steps], results: Arrays | None
) -> tuple[list[tuple[object, Arrays]], list[Arrays]]:
    """Let each variant compute until it next communicates or, if none does any more, to its end."""
    collectives: list[tuple[Any, Arrays]] = []
    ended: list[Arrays] = []
    for steps in running:
        try:
            collectives.append(next(steps) if results is None else steps.send(results))
        except StopIteration as end:
            ended.append(end.value)
    if collectives and ended:
        raise NotOneProgram
    return collectives, ended


def _communicate(
    collectives: Sequence[tuple[Any, Arrays]], chosen: Callable[[Sequence[jax.Array]], jax.Array]
) -> Arrays:
    first, operands = collectives[0]
    for equation, others in collectives[1:]:
        if (
            equation.primitive is not first.primitive
            or not _equal(equation.params, first.params)
            or [(jnp.shape(x), x.dtype) for x in map(jnp.asarray, others)]
            != [(jnp.shape(x), x.dtype) for x in map(jnp.asarray, operands)]
        ):
            raise NotOneProgram
    columns = zip(*(operands for _, operands in collectives), strict=True)
    return apply_equation(first, [chosen(list(map(jnp.asarray, column))) for column in columns])


def _equal(mine: dict[str, Any], yours: dict[str, Any]) -> bool:
    return mine.keys() == yours.keys() and all(
        value is yours[name] or bool(value == yours[name]) for name, value in mine.items()
    )


def _alike(cases: Sequence[jax.Array]) -> list[jax.Array]:
    cases = [jnp.asarray(case) for case in cases]
    shapes = [case.shape for case in cases]
    if len(set(shapes)) == 1:
        return cases
    largest = largest_of(shapes)
    return [
        jnp.pad(case, [(0, size - own) for size, own in zip(largest, case.shape, strict=True)])
        for case in cases
    ]


@final
class _Shared:
    """The results of equations computed so far, for variants that have the same equations."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[list[Any], list[Any]]] = {}

    def apply(self, equation: JaxprEqn, operands: list[jax.Array]) -> list[Any]:
        key = self._key(equation, operands)
        if key is None:
            return apply_equation(equation, operands)
        if key not in self._known:
            # The operands are kept too, so that their ids are not reused.
            self._known[key] = apply_equation(equation, operands), operands
        return self._known[key][0]

    def _key(self, equation: JaxprEqn, operands: list[jax.Array]) -> Any:
        if equation.effects and equation.primitive.name != "axis_index":
            return None
        parts = [
            (str(variable.aval), np.asarray(operand).tobytes())
            if isinstance(variable, Literal) or _is_known_scalar(operand)
            else id(operand)
            for variable, operand in zip(equation.invars, operands, strict=True)
        ]
        key = (equation.primitive, *parts, *sorted(equation.params.items(), key=lambda x: x[0]))
        try:
            hash(key)
        except TypeError:
            return None
        return key


def _is_known_scalar(operand: Any) -> bool:
    """Tell whether an operand is a constant, for which each trace has an object of its own."""
    if isinstance(operand, Tracer):
        return False
    if isinstance(operand, (bool, int, float, complex)):
        return True
    # Constants of JAX 0.12 are arrays of a class of their own. Random keys have no NumPy dtype.
    numeric = isinstance(getattr(operand, "dtype", None), np.dtype)
    return numeric and np.ndim(operand) == 0


def _evaluate(closed: ClosedJaxpr, arguments: Sequence[Nest], shared: _Shared) -> _Steps:
    """Compute a jaxpr; yield each communicating equation and its operands to get its results."""
    jaxpr = without_constants(closed)
    inputs = (*jaxpr.constvars, *jaxpr.invars)
    values: dict[Var, Any] = dict(zip(inputs, (*closed.consts, *arguments), strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        results = on_ref_values(equation, operands)
        if results is not None:
            pass
        elif communicates(equation):
            results = yield equation, operands
        elif not _is_opened(equation):
            results = shared.apply(equation, [unpacked(operand) for operand in operands])
        else:
            called = equation.params.get(_BODIES.get(equation.primitive.name, ""))
            if called is None:
                raise NotOneProgram  # in a loop or a branch
            results = yield from _evaluate(closed_jaxpr(called), operands, shared)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _is_opened(equation: JaxprEqn) -> bool:
    """Tell whether the equations inside an equation are computed one by one.

    Those of every `jax.jit` are: its body, such as the update of an optimizer, may be a new object
    in each variant, and would not be recognized as the same.
    """
    return equation.primitive.name in ("jit", "pjit") or any(
        _communicates_within(inner) for inner in jaxprs_within(equation.params)
    )


def _communicates_within(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    return any(
        communicates(equation) or any(map(_communicates_within, jaxprs_within(equation.params)))
        for equation in jaxpr.eqns
    )
