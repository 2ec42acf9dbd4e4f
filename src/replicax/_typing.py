"""Names for types, and protocols by which lower layers use a strategy without importing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias, TypeVar

import jax
import numpy as np

if TYPE_CHECKING:
    from replicax._enums import GradientReduction
    from replicax.collectives import Collectives
    from replicax.execution import Executor
    from replicax.input import DistributedIterator
    from replicax.topology import DeviceOrSharding, Topology
    from replicax.variables import ServerUpdate, Variable, VariablePlacement, Write

ArrayLike: TypeAlias = "jax.Array | np.ndarray | np.generic | bool | int | float | complex"
# A JAX pytree: an array, or containers of arrays and other objects. Python's types cannot express
# which classes are registered with JAX, so to type checkers it is anything.
Nest: TypeAlias = Any
# A leaf of a nest: an array, a variable, a distributed value, or any other object of the user's.
Leaf: TypeAlias = Any
# A dataset of Grain, `tf.data` or PyTorch, a list or another re-iterable, or a function that
# returns an iterator.
DatasetLike: TypeAlias = Any
# None, booleans, numbers and strings, and lists and dicts of these, as JSON has them.
Json: TypeAlias = Any
# The content of a variable's storage: an array, a `Mirrored`, a `PerReplica`, or whatever a
# user-defined storage keeps. In a program that is being traced, it is made of tracers.
State: TypeAlias = Any
# For functions that return a nest of the same structure as one they are given. Distributed values
# and variables are arrays to type checkers (`_operators.py`), so this says all that they need: a
# function given to `run` returns `jax.Array`s, and `run` values that stand for those of all
# replicas.
Values = TypeVar("Values")
DeviceLike: TypeAlias = "str | jax.Device"


class StrategyLike(Protocol):
    """A strategy, as contexts, variables and executors know it."""

    @property
    def identity(self) -> StrategyLike | None:
        """The stand-in for the strategy in a frame: itself, or None for the default strategy."""
        ...

    @property
    def topology(self) -> Topology: ...

    def run(self, fn: Callable[..., Any], args: Sequence[Nest], kwargs: Any) -> Nest: ...

    @property
    def collectives(self) -> Collectives: ...

    @property
    def _executor(self) -> Executor: ...

    @property
    def placement(self) -> VariablePlacement: ...

    @property
    def gradient_reduction(self) -> GradientReduction: ...

    def _note_variable(self, variable: Variable) -> None:
        """Note that a variable of this strategy has been created."""
        ...


class ProgramLike(Protocol):
    """A program that is being traced, as its participants see it."""

    @property
    def collectives(self) -> Collectives | None:
        """The collectives inside; None if they are the same as outside of programs."""
        ...

    @property
    def inside(self) -> bool:
        """True if this is the part that every replica runs, with its own copies only."""
        ...

    @property
    def is_first_pass(self) -> bool:
        """True if this is the first pass, which finds the variables."""
        ...

    def skips_computing(self) -> bool:
        """Tell whether gradients and updates may be arbitrary: a pass only finds variables."""
        ...

    @property
    def executor(self) -> Executor:
        """The executor that runs functions on the replicas from here."""
        ...

    def state_of(self, variable: Variable) -> State:
        """Return the state of a variable at this point of the program."""
        ...

    def note(self, topology: Topology) -> None:
        """Note that values of replicas over `topology` are combined."""
        ...

    def note_layout(self, array: jax.Array, sharding: object) -> None:
        """Note how an argument is divided over devices, which its tracer does not know."""
        ...

    def is_split(self, value: object, topology: Topology) -> bool:
        """Tell whether a value is an argument that is laid out by rows over the replicas."""
        ...

    def set_state_of(self, variable: Variable, state: State) -> None: ...

    def next_element(self, iterator: DistributedIterator) -> Nest:
        """Return the next element of an iterator, as the program sees it."""
        ...

    def hand_out(self, value: Nest, receive: Callable[[Nest], None]) -> None:
        """Pass a value out of the part that every replica runs, to `receive`."""
        ...

    def loop(self) -> NoReturn:
        """Raise, because the function loops over a whole dataset, of whatever length."""
        ...


class ClosureLike(Protocol):
    """A function that a coordinator schedules, as what it uses sees it."""

    def worker_index(self) -> int | jax.Array:
        """Return the index of the worker that runs it."""
        ...

    def note_write(self, variable: Variable, write: Write, value: jax.Array) -> None:
        """Note a write, which the servers of the variable apply."""
        ...

    def note_updates(self, updates: Sequence[ServerUpdate]) -> None:
        """Note updates, which the servers of the variables compute."""
        ...

    def note_rows(
        self, variable: Variable, write: Write, rows: jax.Array, value: jax.Array
    ) -> None:
        """Note an addition to rows of a variable."""
        ...

    def look_up(self, variable: Variable, rows: jax.Array) -> jax.Array:
        """Return rows of a variable, which the worker fetches before it runs the program."""
        ...

    def peek(self, place: int, count: int) -> list[Nest]:
        """Return examples of the next elements of the iterator that is its argument `place`."""
        ...


class Replica(Protocol):
    """A replica, as its variables know it."""

    @property
    def local_index(self) -> int:
        """The index of the replica among those of this process."""
        ...

    @property
    def replica_id_in_sync_group(self) -> int | jax.Array: ...

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def devices(self) -> tuple[jax.Device, ...]: ...

    @property
    def sharding(self) -> DeviceOrSharding:
        """The sharding of its arrays: its device, or all of its logical devices."""
        ...

    def merge(
        self,
        label: str,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        subjects: Sequence[object] = (),
    ) -> Nest:
        """Meet the other replicas, and call `fn` once in cross-replica context."""
        ...

    def once(self, label: str, make: Callable[[], Values]) -> Values:
        """Make the first replica call `make` on behalf of all, without waiting for the others."""
        ...

    def merge_call(self, fn: Callable[..., Nest], args: Sequence[Nest]) -> Nest:
        """Do the same as `merge`, for values of any kind."""
        ...

    def all_reduce(self, op: str, value: Nest) -> Nest:
        """Combine the replicas' values; each gets the result."""
        ...

    def aggregate(self, variable: Variable, value: jax.Array) -> jax.Array:
        """Combine the replicas' writes to `variable`."""
        ...
