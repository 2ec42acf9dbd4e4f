"""The variable that users see: creation, metadata, reads and writes.

Inside it has two parts: a *storage*, where the arrays are, and a *synchronization*, which says when
copies are brought together. The classes that users see are names for the pairs (`_kinds.py`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from replicax import _context
from replicax._context import ContextKind, Frame
from replicax._enums import VariableAggregation, VariableSynchronization
from replicax._jax_compat import accept_as_array, without_mesh
from replicax._nest import AlwaysLeaf
from replicax._operators import ArrayOperators
from replicax._typing import Nest
from replicax.errors import (
    ContextError,
    InvalidType,
    NotPicklable,
    ShapeMismatch,
)
from replicax.values import Component, Mirrored, PerReplica
from replicax.variables._creation import VariableRequest, create_variable
from replicax.variables._sparse import SparseAccess
from replicax.variables._state import restore_state, set_state, state_of
from replicax.variables._storage import Storage
from replicax.variables._synchronization import OfOneCopy, Synchronization, own_copy
from replicax.variables._write import Write

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from numpy.typing import ArrayLike  # unlike JAX's, this includes lists

    from replicax._enums import AggregationLike, SynchronizationLike
    from replicax._typing import StrategyLike


def _flatten(variable: Variable) -> tuple[tuple[jax.Array], None]:
    return (variable.value,), None


def _unflatten(_: None, children: tuple[object]) -> Any:
    return children[0]


class Variable(AlwaysLeaf, SparseAccess, ArrayOperators):
    """State that lives on the devices of the current strategy.

    In a strategy's scope this makes the strategy's kind of variable, such as a
    `MirroredVariable`; outside, a plain one on one device.

    Args:
      initial_value: An array, anything that can be made one, or a callable that returns it.
      trainable: Whether optimizers should train it; by default yes, except for ON_READ variables.
      name: A name for messages and checkpoints.
      dtype: The type of the elements; by default that of `initial_value`.
      synchronization: When copies are brought together. AUTO means ON_WRITE.
      aggregation: How the values that several replicas write, or have, are combined.
      constraint: A function of the value, which optimizers apply to the updated value.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     weight = rx.Variable([1.0, 2.0], name="weight")
    >>> weight.assign_add([1.0, 1.0])
    MirroredVariable:{
      0: <rx.Variable 'weight' shape=(2,) dtype=float32, value=[2. 3.]>,
      1: <rx.Variable 'weight/replica_1' shape=(2,) dtype=float32, value=[2. 3.]>
    }
    >>> float(weight @ weight)
    13.0
    """

    _request: VariableRequest
    _strategy: StrategyLike | None
    _storage: Storage
    _synchronization: Synchronization
    _shape: tuple[int, ...]
    _dtype: np.dtype
    _copies: tuple[Variable, ...] | None = None
    # The variable that this one is a deep copy of.
    _copied_from: Callable[[], Variable | None] = staticmethod(lambda: None)

    def __new__(
        cls,
        initial_value: ArrayLike | Callable[[], ArrayLike],
        trainable: bool | None = None,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        synchronization: SynchronizationLike = VariableSynchronization.AUTO,
        aggregation: AggregationLike | None = VariableAggregation.NONE,
        constraint: Callable[[jax.Array], Any] | None = None,
    ) -> Variable:
        if constraint is not None and not callable(constraint):
            raise InvalidType(f"`constraint` must be a function; got {constraint!r}.")
        synchronization = VariableSynchronization.parse(synchronization)
        on_read = synchronization is VariableSynchronization.ON_READ
        request = VariableRequest(
            initial_value,
            not on_read if trainable is None else bool(trainable),
            "Variable" if name is None else name,
            dtype,
            synchronization,
            VariableAggregation.parse(aggregation or VariableAggregation.NONE),
            constraint,
        )
        return create_variable(request)

    def __init_subclass__(cls, **kwargs: Nest) -> None:
        super().__init_subclass__(**kwargs)
        # To any JAX function, a variable is its value: JAX provides this way to say so.
        jax.tree_util.register_pytree_node(cls, _flatten, _unflatten)

    @classmethod
    def _made(
        cls,
        request: VariableRequest,
        strategy: StrategyLike | None,
        storage: Storage,
        synchronization: Synchronization,
        dtype: Any,
    ) -> Self:
        """Create a variable from its parts, and tell the strategy about it."""
        self = cls._of_parts(request, strategy, storage, synchronization, dtype)
        if strategy is not None:
            strategy._note_variable(self)
        return self

    @classmethod
    def _of_parts(
        cls,
        request: VariableRequest,
        strategy: StrategyLike | None,
        storage: Storage,
        synchronization: Synchronization,
        dtype: Any,
    ) -> Self:
        """Create a variable, or one copy, from its parts."""
        self = object.__new__(cls)
        # The initial value is left out: it would be kept alive as long as the variable.
        self._request = replace(request, initial_value=None)
        self._strategy, self._storage, self._synchronization = strategy, storage, synchronization
        self._shape, self._dtype = storage.shape, dtype
        return self

    @property
    def values(self) -> tuple[Variable, ...]:
        """The copies, one for each local replica (or the only one)."""
        if self._copies is None:
            if self._storage.num_copies is None:
                return (self,)
            count = range(self._storage.num_copies)
            self._copies = tuple(VariableCopy.of(self, index) for index in count)
        return self._copies

    @property
    def device(self) -> jax.Device:
        """The device of the copy that a read would return here."""
        return self._storage.device(own_copy(self, _context.current()) or 0)

    # What users call.

    @property
    def value(self) -> jax.Array:
        """The replica's own value in replica context; elsewhere the primary copy or aggregate."""
        frame = _context.current()
        if frame.overlay is not None and (found := frame.overlay.find(self)) is not None:
            return found
        return self._synchronization.read(self, frame)

    def read_value(self) -> jax.Array:
        """Return the same as `value`."""
        return self.value

    def numpy(self) -> np.ndarray:
        """Return the value as a NumPy array."""
        return np.asarray(self.value)

    # The further arguments of these methods are for programs written for the reference. A write is
    # complete when the method returns, and cannot be separated from reading.

    def assign(
        self,
        value: ArrayLike,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Set the value; the other arguments have no effect here."""
        return self._assign(Write.ASSIGN, value)

    def assign_add(
        self,
        delta: ArrayLike,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Add to the value; the other arguments have no effect here."""
        return self._assign(Write.ADD, delta)

    def assign_sub(
        self,
        delta: ArrayLike,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Subtract from the value; the other arguments have no effect here."""
        return self._assign(Write.SUB, delta)

    @without_mesh
    def _assign(self, write: Write, value: Any) -> Variable:
        frame = _context.current()
        self._require_no_other_scope(frame)
        value = self._admit(value)
        if frame.overlay is None:
            if isinstance(value, Tracer) and frame.program is None:
                raise InvalidType(
                    f"Variable {self.name!r} was assigned a tracer of a JAX transformation, which "
                    "would not outlive it. Differentiate with `rx.value_and_grad` instead of "
                    "`jax.grad`, or return the value from the transformed function and assign it "
                    "outside."
                )
            self._synchronization.write(self, frame, write, value)
        else:
            # Read the old value first: once replicas have met, another one may have written back.
            old = self.value
            agreed = self._synchronization.agreed(self, frame, value)
            frame.overlay.assign(self, write.applied(old, agreed))
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def dtype(self) -> np.dtype:
        return self._dtype

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def name(self) -> str:
        return self._request.name

    @property
    def trainable(self) -> bool:
        return self._request.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        return self._request.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        return self._request.aggregation

    @property
    def constraint(self) -> Callable[[jax.Array], Any] | None:
        """The function that optimizers apply to updated values of the variable."""
        return self._request.constraint

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape, by the name that tf.distribute programs use."""
        return self._shape

    @property
    def partition(self) -> tuple[int, ...] | None:
        """The number of parts of each dimension, over the logical devices; None if not divided."""
        return self._request.partition

    @property
    def strategy(self) -> StrategyLike | None:
        """The strategy in whose scope it was created; None for a plain variable."""
        return self._strategy

    def _require_no_other_scope(self, frame: Frame) -> None:
        elsewhere = frame.strategy is not None and frame.strategy is not self._strategy
        if elsewhere and self._strategy is not None:
            raise ContextError(
                f"Variable {self.name!r} belongs to {self._strategy!r} and cannot be written here. "
                f"Current context: {frame}. Write it outside of that strategy's scope, or create "
                "it there."
            )

    def _admit(self, value: Any) -> Any:
        """Check a value to be written; return an array, or a Mirrored value unchanged."""
        if isinstance(value, Variable):
            value = value.value
        if isinstance(value, PerReplica):
            if not value.is_one_array():
                raise InvalidType(
                    f"Variable {self.name!r} cannot be assigned a PerReplica value. Combine it "
                    "first with `strategy.reduce`, or assign in the function given to `run`."
                )
            value = jnp.asarray(value)
        array = value.primary if isinstance(value, Mirrored) else value
        source = np.asarray(array) if not isinstance(array, jax.Array) else array
        if not _fits(source, self._dtype):
            raise InvalidType(
                f"Variable {self.name!r} has dtype {self._dtype} and was assigned a value of dtype "
                f"{source.dtype}. Convert it first, e.g. with `.astype({str(self._dtype)!r})`."
            )
        if source.shape != self._shape:
            raise ShapeMismatch(
                f"Variable {self.name!r} has shape {self._shape} and was assigned a value of shape "
                f"{source.shape}."
            )
        if isinstance(value, Mirrored):
            if isinstance(array, jax.Array) and array.dtype == self._dtype:
                return value
            return Mirrored([jnp.asarray(c, self._dtype) for c in value.values], value.topology)
        return jnp.asarray(array, dtype=self._dtype)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise InvalidType(
            f"Variable {self.name!r} cannot be changed by `variable[index] = value`. Write "
            "`variable.assign(variable.value.at[index].set(value))`."
        )

    def __repr__(self) -> str:
        if not self._storage.is_here and _context.current().program is None:
            return _describe_divided(self)
        state = state_of(self)
        copies = [(copy.name, self._storage.read(state, i)) for i, copy in enumerate(self.values)]
        lines = ",\n".join(f"  {i}: {describe(*copy)}" for i, copy in enumerate(copies))
        return f"{type(self).__name__}:{{\n{lines}\n}}"

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(
            f"Variable {self.name!r} cannot be pickled: it is on the devices of this process. "
            "Pickle `variable.numpy()` and assign it to a new variable."
        )

    def __copy__(self) -> NoReturn:
        self.__reduce__()

    def __deepcopy__(self, memo: dict[int, object]) -> Variable:
        """Create another variable, of the same strategy, that begins with this one's value."""
        frame = _context.current()
        if frame.replica is not None or frame.program is not None:
            raise ContextError(
                f"Variable {self.name!r} was copied in a function. Current context: {frame}. Copy "
                "it outside of `run` and of `rx.function`."
            )
        # The copies of an ON_READ variable differ, and have no single value.
        begin = replace(self._request, initial_value=lambda: self.values[0].value)
        with _context.entered(
            Frame(
                self._strategy,
                ContextKind.CROSS_REPLICA,
                colocate_with=self,
                partition=self.partition,
            )
        ):
            memo[id(self)] = copied = create_variable(begin)
        restore_state(copied, state_of(self))
        copied._copied_from = weakref.ref(self)
        return copied


@final
class VariableCopy(Component, Variable):
    """One replica's copy of a variable, as `variable.values` and `update` give it."""

    _container: Variable
    _index: int

    @classmethod
    def of(cls, container: Variable, index: int) -> VariableCopy:
        rule = OfOneCopy(container, index)
        self = cls._of_parts(
            container._request, container._strategy, container._storage, rule, container._dtype
        )
        self._container, self._index = container, index
        return self

    @property
    def container(self) -> Variable:
        return self._container

    @property
    def name(self) -> str:
        name = self._container.name
        return name if self._index == 0 else f"{name}/replica_{self._index}"

    @property
    def values(self) -> tuple[Variable, ...]:
        return (self,)

    @property
    def device(self) -> jax.Device:
        return self._storage.device(self._index)

    def __deepcopy__(self, memo: dict[int, object]) -> Variable:
        return copy.deepcopy(self._container, memo).values[self._index]

    def __repr__(self) -> str:
        if not self._storage.is_here and _context.current().program is None:
            return _describe_divided(self)
        return describe(self.name, self._storage.read(state_of(self._container), self._index))


def describe(name: str, array: jax.Array) -> str:
    """Return one line for one copy."""
    if isinstance(array, Tracer):
        return f"<rx.Variable {name!r} shape={array.shape} dtype={array.dtype}, traced>"
    with np.printoptions(threshold=8, edgeitems=2):
        value = str(np.asarray(array)).replace("\n", "")
    return f"<rx.Variable {name!r} shape={array.shape} dtype={array.dtype}, value={value}>"


def _describe_divided(variable: Variable) -> str:
    """Return one line without the value, which all workers would have to gather together."""
    return (
        f"<rx.{type(_container_of(variable)).__name__} {variable.name!r} "
        f"shape={variable.shape} dtype={variable.dtype}, divided over the workers>"
    )


# For the rest of the library.


def storage_of(variable: Variable) -> Storage:
    """Return the storage of a variable, which has its arrays."""
    return variable._storage


def stored_value(variable: Variable) -> jax.Array:
    """Return the value outside of any program that is being traced."""
    outside = replace(_context.current(), program=None, overlay=None)
    with _context.entered(outside):
        return variable.value


def write_back(variable: Variable, value: jax.Array) -> None:
    """Store the value that a function left for a variable in an overlay."""
    frame = _context.current()
    if frame.overlay is None:
        variable._synchronization.write_back(variable, frame, value)
    else:
        frame.overlay.write(variable, value)


def whole_array(variable: Variable) -> jax.Array:
    """Return all copies as one array, for computations that change every copy alike."""
    whole = _container_of(variable)
    return whole._storage.whole(state_of(whole))


def store_whole_array(variable: Variable, array: jax.Array) -> None:
    """Store the result of such a computation."""
    whole = _container_of(variable)
    set_state(whole, whole._storage.of_whole(array))


def original_of(variable: Variable) -> Variable | None:
    """Return the variable that this one is a deep copy of, if it still exists."""
    return variable._copied_from()


def _container_of(variable: Variable) -> Variable:
    return variable.container if isinstance(variable, VariableCopy) else variable


def _known(variable: Variable) -> jax.Array | jax.ShapeDtypeStruct:
    """Return the value, or its shape and dtype, without reading it."""
    overlay = _context.current().overlay
    found = None if overlay is None else overlay.find(variable)
    return jax.ShapeDtypeStruct(variable.shape, variable.dtype) if found is None else found


accept_as_array(Variable, lambda variable: variable.value, _known)


_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _fits(source: Any, target: Any) -> bool:
    """Tell whether a dtype fits; only NumPy and Python numbers may become a wider kind."""
    if isinstance(source, jax.Array) and not getattr(source, "weak_type", False):
        return source.dtype == target
    return 0 <= _kind(source.dtype) <= _kind(target)


def _kind(dtype: DTypeLike) -> int:
    """Return the rank of a dtype, from bool to complex; -1 if it is not numeric."""
    for rank, kind in enumerate(_KINDS):
        if jnp.issubdtype(dtype, kind):
            return rank
    return -1
