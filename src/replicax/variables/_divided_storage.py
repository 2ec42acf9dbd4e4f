"""The storage of variables of which every replica keeps a part."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from replicax import _context
from replicax.collectives import dispatch
from replicax.errors import CopiesDiffer
from replicax.topology import DeviceOrSharding, Topology
from replicax.values import Mirrored
from replicax.variables._division import (
    Division,
    replicax_gather,
    replicax_gather_once,
    replicax_own_part,
)
from replicax.variables._storage import Keeper, Replicated, StateLayout, Storage
from replicax.variables._write import Write

if TYPE_CHECKING:
    from replicax._typing import State, StrategyLike


@final
@dataclass(frozen=True, slots=True)
class DividedState:
    """A state as its parts or as copies of the whole, one of which is None.

    Args:
      parts: The array of all parts, one after another, with the padding.
      copies: The values that are seen and written, the same on all replicas.
    """

    parts: jax.Array | None = None
    copies: Mirrored | None = None


@final
class Divided(Storage):
    """A part on every replica's devices. Reads gather the parts; each replica writes its own.

    The code of a replica in a program sees whole arrays: they are gathered before it begins, and
    divided after it has ended. `execution/_in_parts.py` lets the program make do with less.

    Args:
      name: The name of the variable.
      shape: The shape of the value.
      strategy: The strategy on whose devices the parts are.
      division: The dimension that is divided, and the number of parts.
      regather: Whether programs gather the variable again for the backward pass.
      keeper: As for `Storage`. Its array is that of all parts, which must not have padding.
      logical: How each part is divided over the logical devices of its replica.
    """

    layout = StateLayout.SHARDED

    @property
    def is_here(self) -> bool:
        return not self.topology.spans_processes

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        strategy: StrategyLike,
        division: Division,
        regather: bool,
        keeper: Keeper | None = None,
        logical: PartitionSpec | None = None,
    ) -> None:
        super().__init__(name, shape, None, keeper)
        self._logical = logical or PartitionSpec()
        self._layout = division.spec_with(self._logical)
        self.division = division
        self._gather = replicax_gather if regather else replicax_gather_once
        self.topology = strategy.topology
        self._copies = Replicated(name, shape, None, strategy, logical)  # the rules for copies
        self._padded = (*shape[: division.axis], division.chunk * division.parts)
        self._padded += shape[division.axis + 1 :]

    def store(self, state: State) -> None:
        # Copies are kept for as long as `update` writes them one after another.
        if state.copies is not None and state.copies.whole is not None:
            state = self._in_parts(state.copies.whole)
        super().store(state)

    def state_of_copies(self, copies: Mirrored) -> DividedState:
        return DividedState(copies=copies)

    def begin(self, state: State) -> None:
        self._agree = None
        self.store(state)

    def _adopted(self, array: jax.Array) -> DividedState:
        return self._in_parts(array)

    def _to_keep(self, state: DividedState, all_copies: bool) -> jax.Array:
        if state.copies is not None:
            state = self._in_parts(state.copies.array(self.topology))
        assert state.parts is not None
        return state.parts

    # In programs.

    def spec(self, topology: Topology) -> PartitionSpec:
        return self.division.spec if topology == self.topology else PartitionSpec()

    def sharding(self, topology: Topology) -> NamedSharding:
        own = topology == self.topology
        return NamedSharding(topology.mesh, self._layout if own else PartitionSpec())

    def array_shape(self, inside: bool, topology: Topology | None) -> tuple[int, ...]:
        foreign = topology is not None and topology != self.topology
        return self.shape if inside or foreign else self._padded

    def own_of(self, block: jax.Array, topology: Topology) -> jax.Array:
        own = topology == self.topology
        return self._gather(block, self.division) if own else block

    def block_of(self, own: jax.Array, topology: Topology) -> jax.Array:
        return replicax_own_part(own, self.division) if topology == self.topology else own

    def wrap(self, array: jax.Array, topology: Topology | None, inside: bool) -> DividedState:
        if inside or (topology is not None and topology != self.topology):
            return DividedState(copies=self._copies.wrap(array, topology, inside))
        return DividedState(parts=array)

    def unwrap(self, state: DividedState, topology: Topology | None) -> jax.Array:
        if topology is not None and topology != self.topology:
            return self._copies.unwrap(self._whole(state), topology)
        if state.copies is None:
            assert state.parts is not None
            return state.parts
        array, program = state.copies.array(self.topology), _context.current().program
        return array if program is not None and program.inside else self.division.padded(array)

    def rewrap(self, array: jax.Array, topology: Topology | None) -> DividedState:
        if topology is None or topology == self.topology:
            return DividedState(parts=array)
        return self._in_parts(self.topology.replicate(array.addressable_data(0)))

    def settled(self, state: DividedState) -> DividedState:
        if state.copies is None:
            return state
        self._require_equal(state.copies)
        return self._in_parts(state.copies.array(self.topology))

    def lift(self, topology: Topology | None) -> jax.Array:
        if self.stored.copies is not None:
            super().store(self.settled(self.stored))
        return super().lift(topology)

    # Copies.

    @property
    def num_copies(self) -> int:
        return self._copies.num_copies

    def device(self, index: int) -> jax.Device:
        return self._copies.device(index)

    def read(
        self, state: DividedState, index: int | None, sharding: DeviceOrSharding | None = None
    ) -> jax.Array:
        return self._copies.read(self._whole(state), index, sharding)

    def with_copy(self, state: DividedState, index: int, write: Write, value: Any) -> DividedState:
        copies = self._copies.with_copy(self._whole(state), index, write, value)
        return DividedState(copies=copies)

    def written(self, state: DividedState, write: Write, value: Any) -> DividedState:
        if state.parts is None or _context.current().program is not None:
            return DividedState(copies=self._copies.written(self._whole(state), write, value))
        if isinstance(value, Mirrored):
            own = value.topology == self.topology
            value = value.array(self.topology) if own else value.primary
        # Nothing is gathered: every replica writes its part.
        return DividedState(parts=write.applied(state.parts, self._in_parts(value).parts))

    def seen(self, state: DividedState) -> Mirrored:
        return self._whole(state)

    def whole(self, state: DividedState) -> jax.Array:
        if state.parts is not None and not self.division.padding:
            return state.parts
        return self._whole(state).array(self.topology)

    def of_whole(self, array: jax.Array) -> DividedState:
        if _context.current().program is not None:
            return DividedState(copies=self._copies.of_whole(array))
        return self._in_parts(array)

    # Between parts and copies.

    def _whole(self, state: DividedState) -> Mirrored:
        """Return the copies of a state, which are gathered if it has parts."""
        if state.copies is not None:
            return state.copies
        assert state.parts is not None
        topology = self.topology
        if isinstance(state.parts, Tracer):
            return Mirrored.from_array(self.division.unpadded(state.parts), topology)
        transaction = _context.current().transaction
        if transaction is None:
            return self._gathered(state)
        # The replicas of an eager `run` gather once: workers may have different numbers of them.
        return transaction.shared(self, state, self._gathered)

    def _gathered(self, state: DividedState) -> Mirrored:
        gather = functools.partial(_whole_of_parts, self.division, self._logical, self.topology)
        with jax.ensure_compile_time_eval():
            array = dispatch(self.topology, f"reading variable {self.name!r}", gather, state.parts)
        return Mirrored.from_array(array, self.topology)

    def _in_parts(self, array: jax.Array) -> DividedState:
        """Return the state in which every replica has its part of an array."""
        with jax.ensure_compile_time_eval():
            padded = self.division.padded(array)
            return DividedState(parts=self.topology.lay_out(padded, self._layout))

    def _require_equal(self, copies: Mirrored) -> None:
        first, *others = (np.asarray(copy) for copy in copies.values)
        # By their bytes, because NumPy knows of no NaN in bfloat16 and its kin.
        if all(first.tobytes() == other.tobytes() for other in others):
            return
        raise CopiesDiffer(
            f"The copies of variable {self.name!r} differ, of which every replica keeps a part. "
            "They were written by `extended.update` with values that are not the same for all "
            "replicas. Reduce these first, or use `rx.MirroredStrategy`."
        )


def _whole_of_parts(
    division: Division, logical: PartitionSpec, topology: Topology, parts: jax.Array
) -> jax.Array:
    whole = division.unpadded(topology.replicate(parts))
    return topology.lay_out(whole, logical) if logical else whole
