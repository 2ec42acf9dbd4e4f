"""One replica's code on all replicas: the `shard_map` of a `run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from replicax._jax_compat import closed_jaxpr, shard_map_of
from replicax.collectives import PackRules
from replicax.execution._in_parts import InParts, has_parts
from replicax.execution._joined_sums import JoinedSums
from replicax.execution._shard_map_operands import SAME, SPLIT
from replicax.execution._varying import varying_outputs
from replicax.topology import REPLICA_AXIS, Topology

Body = Callable[[list[jax.Array], list[jax.Array]], tuple[list[jax.Array], list[jax.Array]]]


def on_replicas(
    body: Body,
    topology: Topology,
    in_specs: tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]],
    new_specs: Sequence[PartitionSpec],
    operands: Sequence[object],
    states: Sequence[object],
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Call `body(operands, states)` on every replica; it returns results and new states.

    The replicas' results come back concatenated, in replica order.
    """
    return _mapped(body, topology, in_specs, (SPLIT, list(new_specs)))(operands, states)


def joins_sums(topology: Topology) -> bool:
    """Tell whether sums over the replicas are joined; accelerators do it by themselves."""
    return topology.spans_processes and topology.on_cpus


@final
class TracedRun:
    """A traced call of `on_replicas`, so that results equal on all replicas can come out once.

    Creating one calls the body.
    """

    def __init__(
        self,
        body: Body,
        topology: Topology,
        in_specs: tuple[Sequence[PartitionSpec], Sequence[PartitionSpec]],
        new_specs: Sequence[PartitionSpec],
        operands: Sequence[jax.Array],
        states: Sequence[Any],
    ) -> None:
        self._topology, self._new_specs = topology, new_specs
        mapped = _mapped(body, topology, in_specs, (SPLIT, list(new_specs)))
        self._program, self._shapes = jax.make_jaxpr(mapped, return_shape=True)(operands, states)
        self._arguments = jax.tree.leaves((operands, states))
        found = shard_map_of(self._program)
        if has_parts(closed_jaxpr(found.body)):
            self._arguments = found.operands(self._arguments)
            specs = [*(SPLIT for _ in self._shapes[0]), *new_specs]
            split = [_is_divided(spec) for spec in found.in_specs]
            in_parts = InParts(closed_jaxpr(found.body), split, topology)
            mapped = _mapped(in_parts, topology, tuple(found.in_specs), specs)
            self._program = jax.make_jaxpr(mapped)(*self._arguments)

    def blank(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return zeros as results and new states, for a pass that needs only shapes."""
        return jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), self._shapes)

    def apply(
        self,
    ) -> tuple[list[jax.Array], list[jax.Array], list[bool], dict[int, jax.Array]]:
        """Return the results, the new states, which results came out once, and sums of others.

        Results that are equal on all replicas by construction come out once. Single numbers are
        summed over the replicas where that does not cost an extra collective.
        """
        found = shard_map_of(self._program)
        split = [_is_divided(spec) for spec in found.in_specs]
        count = len(self._shapes[0])
        varies = varying_outputs(found.body, split, REPLICA_AXIS)[:count]
        body: Callable[..., Any] = jaxpr_as_fun(closed_jaxpr(found.body))
        summed: list[int] = []
        if joins_sums(self._topology):
            rules = PackRules.of(self._topology, 0)
            joined = JoinedSums(closed_jaxpr(found.body), split, count, rules)
            if joined.any:
                body, summed = joined, joined.results
        body = jax.jit(body)  # one equation, as in `_ShardedExecutor`
        specs = [*(SPLIT if v else SAME for v in varies), *self._new_specs]
        mapped = _mapped(
            body, self._topology, tuple(found.in_specs), [*specs, *(SAME for _ in summed)]
        )
        results = mapped(*found.operands(self._arguments))
        sums = dict(zip(summed, results[len(specs) :], strict=True))
        return results[:count], results[count : len(specs)], [not v for v in varies], sums


def _mapped(body: Any, topology: Topology, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    return jax.shard_map(
        body,
        mesh=topology.mesh,
        axis_names={REPLICA_AXIS},  # XLA divides the work over the logical devices
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,  # gradients are local; collectives have rules of their own
    )


def _is_divided(spec: PartitionSpec) -> bool:
    """Tell whether an argument is divided over the replicas, along any dimension."""
    return any(REPLICA_AXIS in (axes if isinstance(axes, tuple) else (axes,)) for axes in spec)
