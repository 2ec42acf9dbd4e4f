"""Replicas on the cores of TPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from replicax import _context, _nest
from replicax._typing import DeviceLike, Nest
from replicax.cluster.resolvers._tpu import TPUClusterResolver
from replicax.errors import InvalidArgument, InvalidType, ShapeMismatch
from replicax.execution import CompilingExecutor
from replicax.strategies._extended import StrategyExtended
from replicax.strategies._strategy import Strategy
from replicax.topology import Topology
from replicax.tpu._device_assignment import DeviceAssignment
from replicax.tpu._system import checked_resolver
from replicax.values import PerReplica, describe_shapes
from replicax.variables import MirroredPlacement


class TPUStrategy(Strategy):
    """One replica per core, or per group of cores, with equal copies of all variables.

    A function given to `run` is always compiled, as if it were an `rx.function`.

    Args:
      tpu_cluster_resolver: Knows the devices; by default all TPUs of this process. A list of
        devices, or of their names, also works.
      experimental_device_assignment: Which cores form which replica; by default each core is one.

    >>> import replicax as rx
    >>> resolver = rx.cluster_resolver.TPUClusterResolver(tpu="local")
    >>> rx.TPUStrategy(resolver).num_replicas_in_sync  # eight virtual CPU devices
    8
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | Sequence[DeviceLike] | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
    ) -> None:
        super().__init__(tpu(self, tpu_cluster_resolver, experimental_device_assignment))

    def gather(self, value: Nest, axis: int) -> Nest:
        """Concatenate the replicas' values along `axis` into one plain array.

        Their shapes must be equal.
        """
        _require_equal_shapes(self, value)
        return super().gather(value, axis)


@final
class ExperimentalTPUStrategy(TPUStrategy):
    """The same strategy, with the arguments that it had when it was experimental.

    Args:
      tpu_cluster_resolver: Knows the devices; by default all TPUs of this process.
      device_assignment: Which cores form which replica; by default each core is one.
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | Sequence[DeviceLike] | None = None,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        super().__init__(tpu_cluster_resolver, device_assignment)


def tpu(
    strategy: Strategy,
    resolver: TPUClusterResolver | Sequence[DeviceLike] | None,
    assignment: DeviceAssignment | None,
) -> StrategyExtended:
    """Return the parts of a strategy on TPUs."""
    if assignment is not None and not isinstance(assignment, DeviceAssignment):
        raise InvalidType(
            "A device assignment must be an `rx.tpu.experimental.DeviceAssignment`; got "
            f"{assignment!r}. Make one with `DeviceAssignment.build(topology, ...)`."
        )
    if assignment is None:
        resolver = checked_resolver("tpu_cluster_resolver", resolver)
        topology = Topology.of(resolver.devices())
    else:
        topology = Topology(assignment.devices)
        resolver = _resolver_of(topology, resolver)
    return StrategyExtended(
        strategy,
        topology=topology,
        placement=MirroredPlacement(),
        executor=CompilingExecutor(),
        cluster_resolver=resolver,
    )


def _resolver_of(topology: Topology, resolver: Any) -> TPUClusterResolver:
    """Return the resolver, which must know these devices, or a new one if it is None."""
    assigned = [device for replica in topology.devices for device in replica]
    if resolver is None:
        return TPUClusterResolver(assigned)
    resolver = checked_resolver("tpu_cluster_resolver", resolver)
    known = resolver.devices()
    strangers = [str(device) for device in assigned if device not in known]
    if strangers:
        raise InvalidArgument(
            "The device assignment must be of the resolver's devices, which are "
            f"{', '.join(map(str, known))}; got {', '.join(strangers)} besides. Build it from "
            "`rx.tpu.experimental.initialize_tpu_system(resolver)`."
        )
    return resolver


def _require_equal_shapes(strategy: Strategy, value: Nest) -> None:
    _context.cross_replica(strategy, "gather")
    for leaf in _nest.leaves(value):
        if isinstance(leaf, PerReplica) and len(set(leaf.shapes)) > 1:
            raise ShapeMismatch(
                f"`gather` of {type(strategy).__name__} needs values of one shape; got "
                f"{describe_shapes(leaf.shapes)}. Pad them, or gather them by "
                "`rx.MirroredStrategy`, where they may differ along the axis."
            )
