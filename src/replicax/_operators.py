"""Arithmetic for objects that stand for an array."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

# Functions of `jax.numpy` accept anything with `__jax_array__`, but their annotations name only
# classes. Type checkers accept these objects as arguments because to them they are arrays.
if TYPE_CHECKING:

    class _Array(jax.Array):
        def __init__(self, *args: object, **kwargs: object) -> None: ...
        def __hash__(self) -> int: ...
        def __array__(  # pyright: ignore[reportIncompatibleMethodOverride]  as NumPy calls it
            self, dtype: DTypeLike | None = None, copy: bool | None = None
        ) -> np.ndarray: ...
        def block_until_ready(self) -> Self: ...
else:
    _Array = object


# Type checkers find the signatures of the operators in the base class.
def _unary(function: Callable[[Any], jax.Array]) -> Any:
    def method(self: Arithmetic) -> jax.Array:
        return function(self.__jax_array__())

    return method


def _binary(function: Callable[[Any, Any], jax.Array]) -> Any:
    def method(self: Arithmetic, other: ArrayLike) -> jax.Array:
        return function(self.__jax_array__(), _operand(other))

    return method


def _reflected(function: Callable[[Any, Any], jax.Array]) -> Any:
    def method(self: Arithmetic, other: ArrayLike) -> jax.Array:
        return function(_operand(other), self.__jax_array__())

    return method


def _operand(other: ArrayLike) -> ArrayLike:
    return other.__jax_array__() if isinstance(other, Arithmetic) else other


class Arithmetic(_Array):
    """The base of objects used in arithmetic, whose array can be indexed and formatted."""

    __slots__ = ()

    # Without this, `numpy_array + self` would loop over the elements of the NumPy array.
    __array_priority__ = 100

    def __jax_array__(self) -> jax.Array:
        raise NotImplementedError

    def __getitem__(self, index: object) -> jax.Array:
        return self.__jax_array__()[index]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.__jax_array__())

    def __format__(self, specification: str) -> str:
        return format(self.__jax_array__(), specification) if specification else str(self)

    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)
    __invert__ = _unary(operator.invert)
    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __matmul__, __rmatmul__ = _binary(operator.matmul), _reflected(operator.matmul)
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _binary(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor), _reflected(operator.xor)
    __lshift__, __rlshift__ = _binary(operator.lshift), _reflected(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift), _reflected(operator.rshift)


class ArrayOperators(Arithmetic):
    """The base of objects used wherever arrays can be: operators, indexing, `jax.numpy`, NumPy."""

    __slots__ = ()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        array = np.asarray(self.__jax_array__())
        return np.array(array, dtype=dtype, copy=True if copy else None)

    def __len__(self) -> int:
        return len(self.__jax_array__())

    def __bool__(self) -> bool:
        return bool(self.__jax_array__())

    def __int__(self) -> int:
        return int(self.__jax_array__())

    def __index__(self) -> int:
        return operator.index(self.__jax_array__())

    def __float__(self) -> float:
        return float(self.__jax_array__())

    def __complex__(self) -> complex:
        return complex(self.__jax_array__())

    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __eq__ = _binary(operator.eq)  # element by element, as arrays do
    __ne__ = _binary(operator.ne)
    # Hashed by identity, so that variables can be keys although `==` compares elements.
    __hash__ = object.__hash__
