"""The variable that users see: creation, metadata, reads, writes; kinds of variables fill it in."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from replicax import _context
from replicax._context import Frame, Kind
from replicax._enums import VariableAggregation, VariableSynchronization
from replicax._jax_compat import accept_as_array, without_mesh
from replicax._nest import Whole
from replicax._operators import ArrayOperators
from replicax.errors import (
    ContextError,
    InvalidType,
    NotPicklable,
    ShapeMismatch,
)
from replicax.values import Mirrored, PerReplica, place
from replicax.variables._creation import VariableRequest, create_variable
from replicax.variables._sparse import SparseAccess
from replicax.variables._state import reusing_states

if TYPE_CHECKING:
    from replicax._typing import ArrayLike, StrategyLike
    from replicax.topology import Topology

Combine = Callable[[Any, Any], Any]


class Variable(Whole, SparseAccess, ArrayOperators):
    """State that lives on the devices of the current strategy.

    In a strategy's scope this makes the strategy's kind of variable, such as a
    `MirroredVariable`; outside, a plain one on one device.

    Args:
      initial_value: An array, anything that can be made one, or a callable that returns it.
      trainable: Whether optimizers should train it; by default yes, but for ON_READ variables.
      name: A name for messages and checkpoints.
      dtype: The type of the elements; by default that of `initial_value`.
      synchronization: When copies are brought together. AUTO means ON_WRITE.
      aggregation: How the values that several replicas write, or have, are combined.
      constraint: A function of the value; optimizers apply it to what they make of the variable.

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

    _strategy: StrategyLike | None
    _request: VariableRequest
    _stored: Any
    # Whether the memory of the stored state is the variable's alone, and may be reused.
    exclusive = False
    # The variable that this one is a deep copy of.
    copied_from: Callable[[], Variable | None] = staticmethod(lambda: None)
    # Whether programs may ever reuse it. Not if somebody else keeps the state, and shows it around.
    reusable = True
    _shape: tuple[int, ...]
    _dtype: np.dtype

    def __new__(
        cls,
        initial_value: ArrayLike | Callable[[], ArrayLike] | Any,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str | None = VariableAggregation.NONE,
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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # In any function of JAX, a variable is its value: this is the way that JAX provides.
        jax.tree_util.register_pytree_node(cls, _flatten, _unflatten)

    @classmethod
    def _build(
        cls, request: VariableRequest, strategy: StrategyLike | None, state: Any, like: jax.Array
    ) -> Self:
        """Makes an instance; `like` has the shape and dtype that the user sees."""
        self = object.__new__(cls)
        # Without the initial value, which would be kept alive as long as the variable.
        self._request = replace(request, initial_value=None)
        self._strategy, self._stored = strategy, state
        self._shape, self._dtype = like.shape, like.dtype
        return self

    # What a kind of variable decides. The class is no `ABC`, or type checkers would refuse
    # `rx.Variable(...)`; kinds are final classes, and the tests make one of each.

    @property
    @abstractmethod
    def values(self) -> tuple[Variable, ...]:
        """The copies, one for each local replica (or the one there is)."""

    @property
    @abstractmethod
    def device(self) -> jax.Device:
        """Where the copy is that a read would give here."""

    @abstractmethod
    def _read(self, frame: Frame) -> jax.Array:
        """The value as seen from `frame`."""

    @abstractmethod
    def _write(self, frame: Frame, combine: Combine, value: Any) -> None:
        """Makes the value `combine(old, value)`, by the rules of `frame`."""

    @abstractmethod
    def _agreed(self, frame: Frame, value: jax.Array) -> jax.Array:
        """What this replica's `value` becomes once all replicas' values are taken into account."""

    @abstractmethod
    def _settle(self, frame: Frame, value: jax.Array) -> None:
        """Stores a value that all replicas have agreed on."""

    @abstractmethod
    def cross_replica_array(self) -> jax.Array:
        """All copies as one array, for computations that change every copy alike."""

    @abstractmethod
    def store_cross_replica_array(self, array: jax.Array) -> None:
        """Takes the result of such a computation."""

    # What users call.

    @property
    def value(self) -> jax.Array:
        """The replica's own value in replica context, else the primary copy or the aggregate."""
        frame = _context.current()
        if frame.overlay is not None and (found := frame.overlay.find(self)) is not None:
            return found
        return self._read(frame)

    def read_value(self) -> jax.Array:
        """The same as `value`."""
        return self.value

    def numpy(self) -> np.ndarray:
        """The value as a NumPy array."""
        return np.asarray(self.value)

    # The further arguments of these are for programs written for the reference. A write is done
    # when it returns, and cannot be taken apart from reading.

    def assign(
        self,
        value: ArrayLike | Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Set the value; the arguments after it change nothing here."""
        return self._assign(_replace, value)

    def assign_add(
        self,
        delta: ArrayLike | Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Add to the value; the arguments after it change nothing here."""
        return self._assign(_add, delta)

    def assign_sub(
        self,
        delta: ArrayLike | Any,
        use_locking: bool = False,
        name: str | None = None,
        read_value: bool = True,
    ) -> Variable:
        """Subtract from the value; the arguments after it change nothing here."""
        return self._assign(_subtract, delta)

    @without_mesh
    def _assign(self, combine: Combine, value: Any) -> Variable:
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
            self._write(frame, combine, value)
        else:
            # The old value first: once the replicas have met, another one may have settled.
            old = self.value
            frame.overlay.assign(self, combine(old, self._agreed(frame, value)))
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
        """The function that optimizers apply to what they make of the variable."""
        return self._request.constraint

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape; the name that programs of the reference use."""
        return self._shape

    @property
    def partition(self) -> tuple[int, ...] | None:
        """Into how many parts each dimension is divided over the logical devices; None if not."""
        return self._request.partition

    @property
    def strategy(self) -> StrategyLike | None:
        """The strategy in whose scope it was created; None for a plain variable."""
        return self._strategy

    # For the rest of the library.

    @property
    def state(self) -> Any:
        """All there is to know about the value here: stored, or in the program being traced."""
        program = _context.current().program
        if program is not None:
            return program.state_of(self)
        with reusing_states:
            self.exclusive = False  # whoever asked may keep it
            return self._stored

    def set_state(self, state: Any) -> None:
        frame = _context.current()
        if frame.program is not None:
            if frame.transaction is not None:
                frame.transaction.remember(self, frame.program.state_of(self))
            frame.program.set_state_of(self, state)
            return
        if frame.transaction is not None:
            frame.transaction.remember(self, self._stored)
        self._stored, self.exclusive = state, False

    def restore_state(self, state: Any) -> None:
        program = _context.current().program
        if program is not None:
            program.set_state_of(self, state)
            return
        self._stored, self.exclusive = state, False

    def lift(self, topology: Topology | None) -> jax.Array:
        """The stored state as a program over `topology` takes it."""
        return self.unwrap_state(self._stored, topology)

    def settle_program(self, array: jax.Array, topology: Topology | None, exclusive: bool) -> None:
        """Stores what a program has made; `exclusive` if nobody else has its memory."""
        self._stored, self.exclusive = self.rewrap_state(array, topology), exclusive

    def stored_value(self) -> jax.Array:
        """The value outside of any program that is being traced."""
        outside = replace(_context.current(), program=None, overlay=None)
        with _context.entered(outside):
            return self.value

    def layout(self, topology: Topology) -> NamedSharding:
        """How the array that stands for the state lies on the devices of `topology`."""
        return topology.split if self.split_over_replicas else topology.replicated

    @property
    def split_over_replicas(self) -> bool:
        """Whether replicas have states of their own, rather than one and the same."""
        return False

    def wrap_state(self, array: jax.Array, topology: Topology | None, inside: bool) -> Any:
        """The state that `array` stands for in a program over `topology`."""
        return array

    def unwrap_state(self, state: Any, topology: Topology | None) -> jax.Array:
        """The array that stands for `state` in a program over `topology`."""
        if topology is None or isinstance(state, Tracer):
            return state
        return topology.replicate(state)

    def rewrap_state(self, array: jax.Array, topology: Topology | None) -> Any:
        """The state to store of an array that a program has returned."""
        return array if topology is None else place(array.addressable_data(0), self.device)

    def settle(self, value: jax.Array) -> None:
        """Stores what a function with an overlay has left for this variable."""
        frame = _context.current()
        if frame.overlay is None:
            self._settle(frame, value)
        else:
            frame.overlay.write(self, value)

    @property
    def _home(self) -> StrategyLike:
        """The strategy, for kinds that always have one."""
        assert self._strategy is not None
        return self._strategy

    def _at_home(self, frame: Frame) -> bool:
        """Whether `frame` belongs to this variable's strategy; elsewhere it acts cross-replica."""
        return self._strategy is not None and frame.strategy is self._strategy

    def _require_no_other_scope(self, frame: Frame) -> None:
        elsewhere = frame.strategy is not None and frame.strategy is not self._strategy
        if elsewhere and self._strategy is not None:
            raise ContextError(
                f"Variable {self.name!r} belongs to {self._strategy!r} and cannot be written here. "
                f"Current context: {frame}. Write it outside of that strategy's scope, or create "
                "it there."
            )

    def _in_replica(self, frame: Frame) -> bool:
        return frame.kind is Kind.REPLICA and self._at_home(frame)

    def _in_update(self, frame: Frame) -> bool:
        return frame.kind is Kind.UPDATE and self._at_home(frame)

    def _admit(self, value: Any) -> Any:
        """Checks a value to be written; returns an array, or a Mirrored value as it is."""
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
        lines = ",\n".join(f"  {i}: {copy!r}" for i, copy in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{lines}\n}}"

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(
            f"Variable {self.name!r} cannot be pickled: it is on the devices of this process. "
            "Pickle `variable.numpy()` and assign it to a new variable."
        )

    def __copy__(self) -> NoReturn:
        self.__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Create another variable, of the same strategy, that begins with this one's value."""
        frame = _context.current()
        if frame.replica is not None or frame.program is not None:
            raise ContextError(
                f"Variable {self.name!r} was copied in a function. Current context: {frame}. Copy "
                "it outside of `run` and of `rx.function`."
            )
        # The copies of an ON_READ variable differ, and have no single value.
        begin = replace(self._request, initial_value=lambda: self.values[0].value)
        with _context.entered(Frame(self._strategy, Kind.CROSS_REPLICA, partition=self.partition)):
            memo[id(self)] = copied = create_variable(begin)
        copied.restore_state(self.state)
        copied.copied_from = weakref.ref(self)
        return copied


def _known(variable: Variable) -> jax.Array | jax.ShapeDtypeStruct:
    """Return what is known of the value without reading it."""
    overlay = _context.current().overlay
    found = None if overlay is None else overlay.find(variable)
    return jax.ShapeDtypeStruct(variable.shape, variable.dtype) if found is None else found


accept_as_array(Variable, lambda variable: variable.value, _known)


def _flatten(variable: Variable) -> tuple[tuple[jax.Array], None]:
    return (variable.value,), None


def _unflatten(_: None, children: tuple[Any]) -> Any:
    return children[0]


def _replace(old: Any, new: Any) -> Any:
    return new


def _add(old: Any, new: Any) -> Any:
    return old + new


def _subtract(old: Any, new: Any) -> Any:
    return old - new


WRITES: dict[Combine, str] = {  # for messages
    _replace: "assign",
    _add: "assign_add",
    _subtract: "assign_sub",
}

_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _fits(source: Any, target: Any) -> bool:
    """Arrays of JAX keep their dtype; NumPy and Python numbers may become a wider kind."""
    if isinstance(source, jax.Array) and not getattr(source, "weak_type", False):
        return source.dtype == target
    return 0 <= _kind(source.dtype) <= _kind(target)


def _kind(dtype: Any) -> int:
    """From bool to complex; -1 for what is no number."""
    for rank, kind in enumerate(_KINDS):
        if jnp.issubdtype(dtype, kind):
            return rank
    return -1
