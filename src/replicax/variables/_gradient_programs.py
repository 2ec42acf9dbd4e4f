"""Values and gradients of functions in eager code, from programs that are kept between calls.

For a network of three layers, JAX takes 8 to 18 ms to differentiate op by op, and 0.2 ms compiled.
So the function is called as ordinary Python to see what it computes (2 ms), and the work is done by
a program that was compiled when the function first computed this, with other numbers. A function
that keeps computing something new is differentiated op by op.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final
from weakref import WeakSet

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from replicax import _nest
from replicax._hints import hint
from replicax._jax_compat import derivative_rules, with_constants, without_constants
from replicax._once import first_time
from replicax._typing import Nest

Function = Callable[[list[jax.Array]], tuple[Any, Nest]]

_DISABLE_JIT = "jax_disable_jit"
_MOST_PROGRAMS = 1024
_MOST_PROGRAMS_MADE = 16


@final
class _Cache:
    """The programs, and what is known about their functions, by the functions' code."""

    def __init__(self) -> None:
        self.programs: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()
        self.need_numbers: WeakSet[Any] = WeakSet()  # functions that cannot be traced
        self._made: Counter[Hashable] = Counter()  # how many a function has needed on a device
        self._lock = threading.Lock()

    def program(
        self, key: Hashable, code: Any, device: Any, make: Callable[[], Callable[..., Any]]
    ) -> Callable[..., Any] | None:
        """Return the program for a key, or None if the function has already needed too many."""
        known = self.programs.get(key)
        with self._lock:
            if known is None:
                if self._made[code, device] == _MOST_PROGRAMS_MADE:
                    return None
                self._made[code, device] += 1
                known = make()
            self.programs[key] = known
            self.programs.move_to_end(key)
            if len(self.programs) > _MOST_PROGRAMS:
                self.programs.popitem(last=False)
        return known


_cache = _Cache()


def value_and_gradients(
    function: Function, code: object, inputs: list[jax.Array]
) -> tuple[tuple[jax.Array, Nest], list[jax.Array]]:
    """Return `((value, aux), gradients)` of `function(inputs)`, which returns `(value, aux)`.

    `code` identifies the user's function from one call to the next.
    """
    traced_already = any(isinstance(value, Tracer) for value in inputs)
    # It is read by name because JAX's stubs lack it; `jax.config.values` would take 10 us.
    disabled = getattr(jax.config, _DISABLE_JIT)
    if traced_already or disabled or code in _cache.need_numbers:
        return jax.value_and_grad(function, has_aux=True)(inputs)
    try:
        jaxpr, rebuild = _trace(function, inputs)
    except Exception:
        # The function looked at numbers, or met other replicas, which it cannot while it is traced.
        # If there is another reason, this raises the error again.
        result = jax.value_and_grad(function, has_aux=True)(inputs)
        _cache.need_numbers.add(code)
        return result
    (value, *rest), gradients = _program(jaxpr, code, inputs)(jaxpr.consts, inputs)
    return (value, rebuild(rest)), gradients


def _trace(
    function: Function, inputs: list[jax.Array]
) -> tuple[ClosedJaxpr, Callable[[list[jax.Array]], Nest]]:
    """Return the function as a jaxpr, and a function that rebuilds `aux` from its results."""
    aux: list[Any] = []
    structure: Any = None

    def flat(inputs: list[jax.Array]) -> list[jax.Array]:
        nonlocal structure
        value, nest = function(inputs)
        aux[:], structure = _nest.flatten(nest)
        return [value, *(leaf for leaf in aux if isinstance(leaf, Tracer))]

    jaxpr = jax.make_jaxpr(flat)(inputs)
    computed = [isinstance(leaf, Tracer) for leaf in aux]
    plain = [None if is_computed else leaf for leaf, is_computed in zip(aux, computed, strict=True)]

    def rebuild(arrays: list[jax.Array]) -> Nest:
        remaining = iter(arrays)
        leaves = [
            next(remaining) if is_computed else leaf
            for leaf, is_computed in zip(plain, computed, strict=True)
        ]
        return jax.tree.unflatten(structure, leaves)

    return jaxpr, rebuild


def _program(jaxpr: ClosedJaxpr, code: object, inputs: list[jax.Array]) -> Callable[..., Any]:
    """Return a function of `(consts, inputs)` that returns `(outputs, gradients)`."""
    equations = without_constants(jaxpr)  # a program must not keep a batch alive

    def differentiate(consts: Sequence[object], inputs: list[jax.Array]) -> object:
        function = jaxpr_as_fun(with_constants(equations, consts))

        def first_and_all(inputs: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            outputs = function(*inputs)
            return outputs[0], outputs

        (_, outputs), gradients = jax.value_and_grad(first_and_all, has_aux=True)(inputs)
        return outputs, gradients

    device = inputs[0].sharding if inputs else None  # each device has its own executable
    try:
        key = (_fingerprint(equations), device)
        known = _cache.program(key, code, device, lambda: jax.jit(differentiate))
    except TypeError:  # unhashable, so it cannot be compared
        return differentiate
    if known is None:
        _hint_at_many(code)
        return differentiate
    return known


def _hint_at_many(code: object) -> None:
    if not first_time("many gradient programs", about=code):
        return
    hint(
        f"`{getattr(code, 'co_qualname', code)}`, which is differentiated, has computed something "
        f"else {_MOST_PROGRAMS_MADE} times, and is differentiated operation by operation from now "
        "on, which is slow. Python numbers that change are a part of what it computes, and so are "
        "shapes: make the numbers arrays (`jnp.asarray(x)`), and keep batches of one size."
    )


def _fingerprint(jaxpr: Jaxpr) -> Hashable:
    """Return a key that is equal for jaxprs that compute the same from inputs and constants."""
    numbers: dict[Any, int] = {}

    def name(atom: object) -> Hashable:
        if isinstance(atom, Literal):
            value = np.asarray(atom.val)
            return (atom.aval, value.tobytes())
        return numbers.setdefault(atom, len(numbers))

    inputs = tuple((name(var), var.aval) for var in (*jaxpr.constvars, *jaxpr.invars))
    equations = tuple(
        (
            equation.primitive,
            _parameters(equation.params),
            tuple(name(atom) for atom in equation.invars),
            tuple((name(var), var.aval) for var in equation.outvars),
        )
        for equation in jaxpr.eqns
    )
    return (inputs, equations, tuple(name(atom) for atom in jaxpr.outvars))


def _parameters(parameters: dict[str, Any]) -> Hashable:
    if "jvp_jaxpr_fun" in parameters or "fwd_jaxpr_thunk" in parameters:
        rules = derivative_rules(parameters)
        if rules is None:
            raise TypeError("the derivative rules do not show")
        return (_part(parameters["call_jaxpr"]), rules)
    return tuple((name, _part(value)) for name, value in parameters.items())


def _part(value: object) -> Hashable:
    if isinstance(value, ClosedJaxpr):
        # Constants are compared by identity: the cached program holds them, so no id is reused.
        constants = tuple(id(constant) for constant in value.consts)
        return (_fingerprint(without_constants(value)), constants)
    if isinstance(value, Jaxpr):
        return _fingerprint(value)
    if isinstance(value, (tuple, list)):
        return tuple(_part(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _part(item)) for name, item in value.items())
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype, value.tobytes())
    hash(value)
    return value
