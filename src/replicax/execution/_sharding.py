"""One replica's code on all replicas: the `shard_map` of a `run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
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


@final
class TracedRun:
    """The same, traced, so that results that are equal on all replicas can come out once.

    Making one calls the body.
    """

    def __init__(
        self,
        body: Body,
        topology: Topology,
        in_specs: tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]],
        new_specs: Sequence[PartitionSpec],
        operands: Sequence[Any],
        states: Sequence[Any],
    ) -> None:
        self._topology, self._new_specs = topology, new_specs
        mapped = _mapped(body, topology, in_specs, (SPLIT, list(new_specs)))
        self._program, self._shapes = jax.make_jaxpr(mapped, return_shape=True)(operands, states)
        self._arguments = jax.tree.leaves((operands, states))

    def blank(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return zeros for the results and for the new states: for a pass that wants shapes."""
        return jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), self._shapes)

    def apply(self) -> tuple[list[jax.Array], list[jax.Array], list[bool]]:
        """Return the results, the new states, and which results came out once.

        These are the ones that are equal on all replicas by construction.
        """
        found = shard_map_of(self._program)
        split = [spec == SPLIT for spec in found.in_specs]
        count = len(self._shapes[0])
        varies = varying_outputs(found.body, split, REPLICA_AXIS)[:count]
        mapped = _mapped(
            jaxpr_as_fun(_closed(found.body)),
            self._topology,
            tuple(found.in_specs),
            [*(SPLIT if v else SAME for v in varies), *self._new_specs],
        )
        results = mapped(*found.operands(self._arguments))
        return results[:count], results[count:], [not v for v in varies]


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
