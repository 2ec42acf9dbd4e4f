"""Names for types, and what lower layers may ask of a strategy without importing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

import jax
import numpy as np

if TYPE_CHECKING:
    from replicax._enums import GradientReduction
    from replicax.collectives import Collectives
    from replicax.execution import Executor
    from replicax.input import DistributedIterator
    from replicax.topology import Home, Topology
    from replicax.variables import Variable, VariablePlacement

ArrayLike: TypeAlias = "jax.Array | np.ndarray | np.generic | bool | int | float | complex"
Nest: TypeAlias = Any  # a JAX pytree
DeviceLike: TypeAlias = "str | jax.Device"


class StrategyLike(Protocol):
    """What contexts, variables and executors know of a strategy."""

    @property
    def identity(self) -> StrategyLike | None:
        """What stands for the strategy in a frame: itself, or None for the default strategy."""
        ...

    @property
    def topology(self) -> Topology: ...

    def run(self, fn: Callable[..., Any], args: Sequence[Nest], kwargs: Any) -> Nest: ...

    @property
    def collectives(self) -> Collectives: ...

    @property
    def placement(self) -> VariablePlacement: ...

    @property
    def gradient_reduction(self) -> GradientReduction: ...


class ProgramLike(Protocol):
    """A program that is being traced, from the point of view of those who take part in it."""

    @property
    def collectives(self) -> Collectives | None:
        """How values are combined inside; None where that is as outside of programs."""
        ...

    @property
    def inside(self) -> bool:
        """Whether this is the part that every replica runs, with its own copies only."""
        ...

    @property
    def finding(self) -> bool:
        """Whether this is the first pass, which finds the variables."""
        ...

    def skips_derivatives(self) -> bool:
        """Tell whether any numbers will do for gradients, since the pass only finds variables."""
        ...

    @property
    def executor(self) -> Executor:
        """How a function runs on the replicas from here."""
        ...

    def state_of(self, variable: Variable) -> Any:
        """The state of a variable at this point of the program."""
        ...

    def note(self, topology: Topology) -> None:
        """Says that values of replicas over `topology` are combined."""
        ...

    def note_layout(self, array: jax.Array, sharding: Any) -> None:
        """Say how an argument is divided over devices, which its tracer does not know."""
        ...

    def is_split(self, value: Any, topology: Topology) -> bool:
        """Tell whether a value is an argument that is laid out by rows over the replicas."""
        ...

    def set_state_of(self, variable: Variable, state: Any) -> None: ...

    def pull(self, iterator: DistributedIterator) -> Nest:
        """The next element of an iterator, as the program sees it."""
        ...

    def hand_out(self, value: Nest, receive: Callable[[Nest], None]) -> None:
        """Brings a value out of the part that every replica runs, where `receive` gets it."""
        ...

    def loop(self) -> NoReturn:
        """Says that the function goes through a dataset, in as many steps as that has."""
        ...


class Replica(Protocol):
    """What variables know of the replica that they are used in."""

    @property
    def local_index(self) -> int:
        """Which of this process's replicas it is."""
        ...

    @property
    def replica_id_in_sync_group(self) -> int | jax.Array: ...

    @property
    def num_replicas_in_sync(self) -> int: ...

    @property
    def devices(self) -> tuple[jax.Device, ...]: ...

    @property
    def home(self) -> Home:
        """Where its arrays are."""
        ...

    def merge(
        self,
        label: str,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        subjects: Sequence[Any] = (),
    ) -> Nest:
        """Meets the other replicas, and calls `fn` once in cross-replica context."""
        ...

    def once(self, label: str, make: Callable[[], Any]) -> Any:
        """Call `make` once for all replicas, by the first one, which waits for nobody."""
        ...

    def merge_call(self, fn: Callable[..., Nest], args: Sequence[Nest]) -> Nest:
        """The same, for values that may be anything."""
        ...

    def all_reduce(self, op: str, value: Nest) -> Nest:
        """Combines the replicas' values; each gets the result."""
        ...

    def aggregate(self, variable: Variable, value: jax.Array) -> jax.Array:
        """Combines what the replicas write to `variable`."""
        ...
