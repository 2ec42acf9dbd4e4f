"""With which value a variable begins, and how that gets to the devices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
from jax.errors import ConcretizationTypeError, TracerArrayConversionError
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from replicax import cluster
from replicax.errors import CollectiveMismatch, InvalidArgument
from replicax.topology import Topology
from replicax.values import Mirrored, PerReplica
from replicax.variables._creation import VariableRequest
from replicax.variables._variable import Variable

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


def from_first_worker(
    strategy: StrategyLike, request: VariableRequest, array: jax.Array
) -> Mirrored:
    """The value that the first worker has, on all devices; the others' are of no account."""
    topology = strategy.topology
    if not topology.spans_processes:
        return Mirrored.from_array(topology.replicate(array), topology)
    session = cluster.current()
    label = f"the creation of variable {request.name!r}"
    made = session.meet(label, [list(array.shape), str(array.dtype)])
    if any(each != made[0] for each in made):
        seen = "; ".join(
            f"{name} has shape {tuple(shape)} and dtype {dtype}"
            for name, (shape, dtype) in zip(session.members.names, made, strict=True)
        )
        raise CollectiveMismatch(
            f"Variable {request.name!r} does not begin alike on all workers: {seen}. Create the "
            "same variables in the same order on every worker."
        )
    copies = jax.device_put([array] * len(topology.local_homes), list(topology.local_homes))
    own = PerReplica(copies, topology, shapes=[array.shape] * topology.num_replicas)
    return strategy.collectives.broadcast(own)


def in_parts(strategy: StrategyLike, request: VariableRequest) -> tuple[jax.Array, PartitionSpec]:
    """The initial value, divided over the logical devices, and how it is divided.

    That of a callable is made where it is wanted: it may be too large for one device.
    """
    topology, made, like = strategy.topology, None, None
    if callable(request.initial_value) and not topology.spans_processes:
        # What looks at numbers cannot be traced, and is called as it is.
        with suppress(ConcretizationTypeError, TracerArrayConversionError):
            made, like = jax.make_jaxpr(request.initial_array_or_tracer, return_shape=True)()
    if made is None or like is None:
        array = request.initial_array()
        _, spec = layout_of(request, topology, array.shape)
        if topology.spans_processes:
            array = from_first_worker(strategy, request, array).array(topology)
        return topology.lay_out(array, spec), spec
    _, spec = layout_of(request, topology, like.shape)
    layout = NamedSharding(topology.mesh, spec)
    return jax.jit(jaxpr_as_fun(made), out_shardings=[layout])()[0], spec


def layout_of(
    request: VariableRequest, topology: Topology, shape: Sequence[int], neighbour: Any = None
) -> tuple[VariableRequest, PartitionSpec]:
    """What is asked for once the shape is known, and how that is divided.

    A slot is divided like its variable, the neighbour; of a scalar there are no parts.
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
