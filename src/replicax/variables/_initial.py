"""The initial value of a variable, and how it reaches the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, final

import jax
from jax.errors import ConcretizationTypeError, TracerArrayConversionError
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from replicax import _context, cluster
from replicax.collectives import first_workers
from replicax.errors import CollectiveMismatch, InvalidArgument, ReplicaxError
from replicax.topology import Topology
from replicax.values import Mirrored
from replicax.variables._creation import VariableRequest
from replicax.variables._storage import Storage
from replicax.variables._variable import Variable

if TYPE_CHECKING:
    from replicax._typing import StrategyLike

# Initial values are kept whole until the workers have agreed on them.
MOST_WAITING_BYTES = 32 * 2**20


def begin_alike(
    storage: Storage, topology: Topology, array: jax.Array, state_of: Callable[[Mirrored], object]
) -> None:
    """Initialize a storage with the first worker's value; the others' arrays are ignored.

    Workers agree on many variables at once: when the first of them is used, the scope is left, the
    workers wait for each other in any other way, or the waiting values take up too much memory.
    """
    if not topology.spans_processes:
        storage.begin(state_of(Mirrored.from_array(topology.replicate(array), topology)))
        return
    cluster.current().postponed(_Beginnings).add(_Beginning(storage, topology, array, state_of))


def agree_on_beginnings() -> None:
    """Agree now on all variables that were created, if there are several workers."""
    session = cluster.session()
    if session is not None:
        session.catch_up()


@final
@dataclass(frozen=True, slots=True)
class _Beginning:
    """A storage that waits for the first worker's value, and this worker's own."""

    storage: Storage
    topology: Topology
    array: jax.Array
    state_of: Callable[[Mirrored], Any]


@final
class _Beginnings:
    """The variables that were created since the workers last did something together."""

    def __init__(self) -> None:
        self._waiting: list[_Beginning] = []

    def add(self, beginning: _Beginning) -> None:
        self._waiting.append(beginning)
        beginning.storage.await_agreement(cluster.current().catch_up)
        if sum(each.array.nbytes for each in self._waiting) > MOST_WAITING_BYTES:
            cluster.current().catch_up()

    def agree(self) -> None:
        """Agree on all waiting variables, and initialize their storages."""
        while self._waiting:
            try:
                count = _compare([_key(each.storage.name, each.array) for each in self._waiting])
            except ReplicaxError as error:
                self._give_up(error)
                raise
            agreed = self._waiting[:count]
            outside = replace(_context.current(), program=None, overlay=None)
            with _context.entered(outside), jax.ensure_compile_time_eval():
                for topology in dict.fromkeys(each.topology for each in agreed):
                    here = [each for each in agreed if each.topology == topology]
                    # One at a time: together, the values may be too large for a device.
                    for index, value in first_workers([each.array for each in here], topology):
                        here[index].storage.begin(here[index].state_of(value))
            del self._waiting[:count]  # not before: after a failure they still have no value

    def _give_up(self, error: ReplicaxError) -> None:
        """Make every use of these variables raise the error again."""
        kind, message = type(error), str(error)

        def refuse() -> NoReturn:
            raise kind(message)

        for each in self._waiting:
            each.storage.await_agreement(refuse)
        self._waiting.clear()


def _key(name: str, array: jax.Array) -> list[Any]:
    return [name, list(array.shape), str(array.dtype)]


def _compare(keys: list[list[Any]]) -> int:
    """Compare created variables with the other workers'; return how many all workers have.

    A worker that has read a variable in between brings fewer at first, and the rest afterwards.
    """
    session = cluster.current()
    everyones = session.all_gather(f"the creation of variable {keys[0][0]!r}", keys)
    for theirs in zip(*everyones, strict=False):
        _require_equal(theirs, session.members.names)
    return min(map(len, everyones))


def _require_equal(keys: Sequence[Sequence[Any]], workers: Sequence[str]) -> None:
    if all(key == keys[0] for key in keys):
        return
    others = any(key[0] != keys[0][0] for key in keys)
    seen = "; ".join(
        f"{worker} has {f'{name!r} of ' if others else ''}shape {tuple(shape)} and dtype {dtype}"
        for worker, (name, shape, dtype) in zip(workers, keys, strict=True)
    )
    raise CollectiveMismatch(
        f"Variable {keys[0][0]!r} does not begin alike on all workers: {seen}. Create the same "
        "variables in the same order on every worker."
    )


def in_parts(strategy: StrategyLike, request: VariableRequest) -> tuple[jax.Array, PartitionSpec]:
    """Return the initial value, divided over the logical devices, and how it is divided.

    The value of a callable is made on all of them, since it may be too large for one device.
    """
    topology, made, like = strategy.topology, None, None
    if callable(request.initial_value) and not topology.spans_processes:
        # A callable that looks at numbers cannot be traced, and is simply called.
        with suppress(ConcretizationTypeError, TracerArrayConversionError):
            made, like = jax.make_jaxpr(request.initial_array_or_tracer, return_shape=True)()
    if made is None or like is None:
        array = request.initial_array()
        _, spec = layout_of(request, topology, array.shape)
        if topology.spans_processes:
            _compare([_key(request.name, array)])
            ((_, value),) = first_workers([array], topology)
            array = value.array(topology)
        return topology.lay_out(array, spec), spec
    _, spec = layout_of(request, topology, like.shape)
    layout = NamedSharding(topology.mesh, spec)
    return jax.jit(jaxpr_as_fun(made), out_shardings=[layout])()[0], spec


def layout_of(
    request: VariableRequest, topology: Topology, shape: Sequence[int], neighbour: object = None
) -> tuple[VariableRequest, PartitionSpec]:
    """Return the request, completed now that the shape is known, and the partition.

    A slot is divided like its variable, the neighbour; a scalar has no parts.
    """
    parts = request.partition
    if parts is None and isinstance(neighbour, Variable) and neighbour.shape == tuple(shape):
        parts = neighbour.partition
    if parts is None or not shape:
        return replace(request, partition=None), PartitionSpec()
    try:
        return replace(request, partition=parts), topology.partition(parts, shape)
    except InvalidArgument as error:
        error.add_note(f"It is the initial value of variable {request.name!r}.")
        raise
