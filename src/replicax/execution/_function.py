"""`rx.function`: compiled execution."""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, final, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import get_opaque_trace_state

from replicax import _context, _nest
from replicax._context import Frame, Kind
from replicax._typing import Nest
from replicax.errors import InvalidArgument, InvalidType, PerformanceHint
from replicax.execution._program import NotOneProgram
from replicax.execution._state_lifting import Lifted
from replicax.values import Mirrored, PerReplica
from replicax.variables import Variable

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

_MANY_TRACES = 10
_MANY_UNEVEN_CALLS = 300
_untraced = get_opaque_trace_state()
_eagerly = False
_missing: Any = object()


def run_functions_eagerly(flag: bool) -> None:
    """Makes every `rx.function` run as ordinary Python (True), or compiled again (False).

    For debugging: breakpoints and prints in the function then see numbers.
    """
    global _eagerly
    _eagerly = bool(flag)


@final
class Function:
    """A function that is compiled, once for each signature; made by `rx.function`."""

    def __init__(self, python_function: Callable[..., Any], input_signature: Any = None) -> None:
        functools.update_wrapper(self, python_function)
        self.python_function = python_function
        self.input_signature = None if input_signature is None else tuple(input_signature)
        self._programs: dict[Any, Lifted | None] = {}  # None: runs eagerly
        self._warned = False
        self._uneven_calls = 0
        self._last_signature: _Signature | None = None

    @property
    def tracing_count(self) -> int:
        """How many signatures it has been traced for."""
        return len(self._programs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = _context.current()
        if self.is_inlined(frame):
            return self.python_function(*args, **kwargs)
        return self._call(None, frame, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def is_inlined(self, frame: Frame) -> bool:
        """Whether it is part of something larger, which decides how it is executed."""
        return (
            _eagerly
            or frame.program is not None
            or frame.overlay is not None
            or (frame.kind is Kind.REPLICA and frame.strategy is not None)
            or get_opaque_trace_state() != _untraced
        )

    def run_by(
        self,
        strategy: StrategyLike,
        frame: Frame,
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        """`strategy.run` of this function, as one program."""
        return self._call(strategy, frame, tuple(args), dict(kwargs))

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The program for these arguments, without running it.

        `.as_text()` shows it as JAX hands it to XLA, `.compile().as_text()` as XLA made it,
        `.cost_analysis()` what it costs.
        """
        frame = _context.current()
        signature, arrays = self._signature(None, frame, args, kwargs)
        program = self._program(signature, arrays)
        if program is None:
            raise InvalidArgument(
                f"`{self.__name__}` runs eagerly for these arguments, because the replicas' shapes "
                "differ; there is no program to show."
            )
        return program.lower(arrays)

    def _call(
        self, strategy: StrategyLike | None, frame: Frame, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if self.input_signature is not None:
            args = self._conform(args, kwargs)
        signature, arrays = self._signature(strategy, frame, args, kwargs)
        if signature is not None:
            program = self._program(signature, arrays)
            if program is not None:
                return program(arrays)
        # Replicas that differ in shape are no single program: each runs by itself, exactly.
        self._warn_of_uneven_shares()
        with _context.entered(replace(_context.current(), uneven=True)):
            if strategy is None:
                return self.python_function(*args, **kwargs)
            return strategy.run(self.python_function, args, kwargs)

    def _program(self, signature: _Signature | None, arrays: list[Any]) -> Lifted | None:
        if signature is None:
            return None
        program = self._programs.get(signature, _missing)
        if program is not _missing:
            return program
        try:
            program = Lifted(signature.bind(self.python_function), signature.frame, arrays)
        except NotOneProgram:
            program = None
        signature.forget_values()
        self._programs[signature] = program
        self._warn_of_retracing(signature)
        self._last_signature = signature
        return program

    def _signature(
        self, strategy: StrategyLike | None, frame: Frame, args: Any, kwargs: Any
    ) -> tuple[_Signature | None, list[Any]]:
        leaves, structure = _nest.flatten((args, kwargs))
        keys: list[Any] = []
        arrays: list[Any] = []
        fill: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, jax.Array):
                keys.append((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)))
                arrays.append(leaf)
                fill.append(_itself)
            elif isinstance(leaf, PerReplica):
                topology = leaf.topology or (strategy or frame.strategy or _Nowhere).topology
                if topology is None or not leaf.uniform or leaf.samples()[0] is None:
                    return None, []
                if not hasattr(leaf.samples()[0], "dtype") and not np.isscalar(leaf.samples()[0]):
                    return None, []
                array = leaf.array(topology)
                scalars = leaf.scalars
                keys.append((array.shape, array.dtype, topology, scalars))
                arrays.append(array)
                fill.append(functools.partial(_per_replica, topology, scalars))
            elif isinstance(leaf, Mirrored) and leaf.topology is not None:
                array = leaf.array(leaf.topology)
                keys.append((array.shape, array.dtype, leaf.topology))
                arrays.append(array)
                fill.append(functools.partial(_mirrored, leaf.topology))
            elif isinstance(leaf, (np.ndarray, np.generic)):
                keys.append((leaf.shape, leaf.dtype))
                arrays.append(leaf)
                fill.append(_itself)
            else:
                keys.append(_static_key(leaf))
                fill.append(None)
        key = (strategy, frame.strategy, frame.kind, structure, tuple(keys))
        return _Signature(key, frame, strategy, leaves, structure, fill), arrays

    def _conform(self, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, ...]:
        """The arguments, checked against the input signature; numbers as the arrays it asks for."""
        assert self.input_signature is not None
        wanted, structure = jax.tree.flatten(self.input_signature)
        given, given_structure = _nest.flatten(args)
        if kwargs or given_structure != structure:
            raise InvalidType(
                f"`{self.__name__}` has the input signature {self.input_signature}, and was called "
                f"with {args}{f' and {kwargs}' if kwargs else ''}, which has another structure."
            )
        return jax.tree.unflatten(
            structure,
            [self._conform_leaf(spec, leaf) for spec, leaf in zip(wanted, given, strict=True)],
        )

    def _conform_leaf(self, spec: jax.ShapeDtypeStruct, leaf: Any) -> Any:
        if isinstance(leaf, (bool, int, float, complex)):
            leaf = jnp.asarray(leaf, spec.dtype)
        samples = leaf.samples() if isinstance(leaf, PerReplica) else (leaf,)
        for sample in samples:
            shape, dtype = np.shape(sample), getattr(sample, "dtype", None)
            # A last partial batch has fewer rows than the signature says.
            fewer = len(shape) == len(spec.shape) > 0 and shape[0] <= spec.shape[0]
            if dtype != spec.dtype or not (
                shape == spec.shape or (fewer and shape[1:] == spec.shape[1:])
            ):
                raise InvalidType(
                    f"`{self.__name__}` has the input signature {spec}, and was called with a "
                    f"value of shape {shape} and dtype {dtype}."
                )
        return leaf

    def _warn_of_uneven_shares(self) -> None:
        self._uneven_calls += 1
        if self._uneven_calls == _MANY_UNEVEN_CALLS:
            warnings.warn(
                f"`{self.__name__}` has run eagerly {_MANY_UNEVEN_CALLS} times, because the "
                "replicas' shares had different shapes. Compiled it is faster: use a global batch "
                "that divides by the number of replicas.",
                PerformanceHint,
                stacklevel=4,
            )

    def _warn_of_retracing(self, signature: _Signature) -> None:
        if self._warned or len(self._programs) <= _MANY_TRACES or self._last_signature is None:
            return
        self._warned = True
        warnings.warn(
            f"`{self.__name__}` has been traced {len(self._programs)} times, which is slow. The "
            f"last time because {self._last_signature.difference(signature)}. Pass numbers that "
            "change as arrays (`jnp.asarray(x)`), and batches of one size.",
            PerformanceHint,
            stacklevel=4,
        )

    def __repr__(self) -> str:
        return f"<rx.function {self.__name__}>"

    __name__: str


class _Nowhere:
    topology = None


class _Signature:
    """For which arguments a program is good; while it is made, also the arguments themselves."""

    __slots__ = ("_fill", "_hash", "_key", "_leaves", "_strategy", "_structure", "frame")

    def __init__(
        self, key: Any, frame: Any, strategy: Any, leaves: Any, structure: Any, fill: Any
    ) -> None:
        self._key = key
        self._hash = hash(key)
        self.frame: Any = frame
        self._strategy = strategy
        self._leaves: Any = leaves
        self._structure = structure
        self._fill: Any = fill

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Signature) and self._key == other._key

    def bind(self, python_function: Callable[..., Any]) -> Callable[[list[Any]], Nest]:
        """The function of the arrays alone."""
        leaves, fills, structure, strategy = (
            self._leaves,
            self._fill,
            self._structure,
            self._strategy,
        )

        def function(arrays: list[Any]) -> Nest:
            remaining = iter(arrays)
            filled = [
                leaf if fill is None else fill(next(remaining))
                for leaf, fill in zip(leaves, fills, strict=True)
            ]
            args, kwargs = jax.tree.unflatten(structure, filled)
            if strategy is None:
                return python_function(*args, **kwargs)
            return strategy.run(python_function, args, kwargs)

        return function

    def forget_values(self) -> None:
        """Lets go of the arguments: a program kept for long must not keep a batch alive."""
        self._leaves = self._fill = self.frame = None

    def difference(self, other: _Signature) -> str:
        """Where two signatures differ, in words."""
        names = ("the strategy", "the scope", "the context", "the structure of the arguments")
        for name, mine, yours in zip(names, self._key, other._key, strict=False):
            if mine != yours:
                return f"{name} changed from {mine} to {yours}"
        paths = jax.tree_util.tree_flatten_with_path(
            jax.tree.unflatten(self._structure, list(range(len(self._key[-1]))))
        )[0]
        for (path, index), mine, yours in zip(paths, self._key[-1], other._key[-1], strict=True):
            if mine != yours:
                return (
                    f"argument {_argument_name(path, index)} changed from {_words(mine)} to "
                    f"{_words(yours)}"
                )
        return "nothing that shows changed"


def _argument_name(path: Any, index: int) -> str:
    _, *inner = path
    return jax.tree_util.keystr(tuple(inner)) or str(index)


def _words(key: Any) -> str:
    if isinstance(key, _Static):
        return repr(key)
    shape, dtype, *_ = key
    return f"{dtype}{list(shape)}"


def _itself(array: Any) -> Any:
    return array


def _per_replica(topology: Any, scalars: bool, array: Any) -> PerReplica:
    return PerReplica.from_array(array, topology, scalars=scalars)


def _mirrored(topology: Any, array: Any) -> Mirrored:
    return Mirrored.from_array(array, topology)


class _Static:
    """A Python value that a program was made for: compared by value, or else by identity."""

    __slots__ = ("_by_identity", "_hash", "_value")

    def __init__(self, value: Any) -> None:
        plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes))
        self._by_identity = not plain and (
            isinstance(value, Variable) or type(value).__eq__ is object.__eq__
        )
        if self._by_identity:
            self._hash = id(value)
            self._value: Any = _reference(value)
        else:
            self._hash = hash((type(value), value))
            self._value = value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static) or self._by_identity != other._by_identity:
            return False
        mine, yours = self._value, other._value
        if self._by_identity:
            mine, yours = mine(), yours()
            return mine is yours and mine is not None
        return type(mine) is type(yours) and mine == yours

    def __repr__(self) -> str:
        return repr(self._value() if self._by_identity else self._value)


def _reference(value: Any) -> Callable[[], Any]:
    """A weak reference where the type allows it, so that programs keep no object alive."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _static_key(leaf: Any) -> _Static:
    try:
        return _Static(leaf)
    except TypeError:
        raise InvalidType(
            f"An `rx.function` got an argument that is neither an array nor hashable: {leaf!r} of "
            f"type {type(leaf).__name__}. Register the type as a pytree, or pass arrays."
        ) from None


@overload
def function(fn: Callable[..., Any], *, input_signature: Any = None) -> Function: ...
@overload
def function(
    fn: None = None, *, input_signature: Any = None
) -> Callable[[Callable[..., Any]], Function]: ...
def function(fn: Callable[..., Any] | None = None, *, input_signature: Any = None) -> Any:
    """Compiles a function: one SPMD program a call, traced once for each signature.

    Variables that it reads and writes are found by tracing. It can be called as it is, with
    `strategy.run` inside, or be given to `strategy.run`.

    Args:
      fn: The function. Arrays in its arguments may change from call to call; other values make a
        program of their own each. Without it, `function` is a decorator with arguments.
      input_signature: A sequence of `jax.ShapeDtypeStruct`, one for each positional argument (or
        nests of them): other arguments are refused.

    >>> import numpy as np, replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     total = rx.Variable(0.0, aggregation="SUM")
    >>> @rx.function
    ... def step(x):
    ...     strategy.run(lambda x: total.assign_add(x), args=(x,))
    ...     return total * 2
    >>> float(step(np.float32(1.0))), float(step(np.float32(2.0)))
    (4.0, 12.0)
    >>> step.tracing_count
    1
    """
    if fn is None:
        return lambda fn: function(fn, input_signature=input_signature)
    if isinstance(fn, Function):
        return Function(fn.python_function, input_signature)
    if not callable(fn):
        raise InvalidType(f"`rx.function` compiles a function; got {fn!r}.")
    return Function(fn, input_signature)
