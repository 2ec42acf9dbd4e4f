"""One replica's code on all replicas: the `shard_map` of a `run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec

from replicax._jax_compat import shard_map_of, with_constants
from replicax.execution._operands import SAME, SPLIT
from replicax.execution._varying import varying_outputs
from replicax.topology import REPLICA_AXIS, Topology

Body = Callable[[list[jax.Array], list[jax.Array]], tuple[list[jax.Array], list[jax.Array]]]


def on_replicas(
    body: Body,
    topology: Topology,
    in_specs: tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]],
    new_specs: Sequence[PartitionSpec],
    operands: Sequence[Any],
    states: Sequence[Any],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Call `body(operands, states)` on every replica; it returns results and new states.

    Results come back one after another, each replica's in turn.
    """
    return _mapped(body, topology, in_specs, (SPLIT, list(new_specs)))(operands, states)


def on_replicas_once_if_same(
    body: Body,
    topology: Topology,
    in_specs: tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]],
    new_specs: Sequence[PartitionSpec],
    operands: Sequence[Any],
    states: Sequence[Any],
) -> tuple[list[jax.Array], list[jax.Array], list[bool]]:
    """Do the same, but bring results that are equal on all replicas by construction out once.

    The last result says which these are.
    """
    mapped = _mapped(body, topology, in_specs, (SPLIT, list(new_specs)))
    program, shapes = jax.make_jaxpr(mapped, return_shape=True)(operands, states)
    count, structure = len(shapes[0]), jax.tree.structure(shapes)
    found = shard_map_of(program)
    arguments = jax.tree.leaves((operands, states))
    varies = varying_outputs(found.body, [spec == SPLIT for spec in found.in_specs], REPLICA_AXIS)
    results, new_states = jax.tree.unflatten(
        structure,
        _mapped(
            jaxpr_as_fun(_closed(found.body)),
            topology,
            tuple(found.in_specs),
            [*(SPLIT if v else SAME for v in varies[:count]), *new_specs],
        )(*found.operands(arguments)),
    )
    return results, new_states, [not v for v in varies[:count]]


def _mapped(body: Any, topology: Topology, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(
        body,
        mesh=topology.mesh,
        axis_names={REPLICA_AXIS},  # XLA divides the work over the logical devices
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,  # gradients are local; collectives have rules of their own
    )


def _closed(jaxpr: Any) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else with_constants(jaxpr, ())
