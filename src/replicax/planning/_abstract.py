"""A strategy over devices that do not exist, whose variables have shapes but no values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final

import jax
import numpy as np
from jax.sharding import NamedSharding

from replicax import _nest
from replicax._context import Frame
from replicax._enums import VariableSynchronization
from replicax._typing import Leaf, Nest
from replicax.collectives import CommunicationOptions
from replicax.errors import ContextError, InvalidArgument
from replicax.execution import Executor
from replicax.strategies import Strategy, StrategyExtended
from replicax.topology import Topology
from replicax.values import PerReplica
from replicax.variables import (
    MirroredVariable,
    ShardedPlacement,
    SyncOnReadVariable,
    Variable,
    VariablePlacement,
    VariableRequest,
    layout_of,
)

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


@final
class PlannedStrategy(Strategy):
    """The strategy that a planned program is given, over described devices.

    Args:
      topology: The devices.
      placement: Divides variables over the replicas; None leaves them whole.
    """

    def __init__(self, topology: Topology, placement: ShardedPlacement | None = None) -> None:
        self._made = AbstractPlacement(placement)
        bytes_per_pack = 0 if placement is None else placement.bytes_per_pack
        extended = StrategyExtended(
            self,
            topology=topology,
            placement=self._made,
            executor=_NothingRuns(),
            communication_options=CommunicationOptions(bytes_per_pack=bytes_per_pack),
        )
        super().__init__(extended)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables in the order in which they were created."""
        return tuple(self._made.variables)


@final
class AbstractPlacement(VariablePlacement):
    """A placement that makes variables with a `jax.ShapeDtypeStruct` instead of an array.

    Args:
      sharded: Divides variables over the replicas; None leaves them whole.
    """

    def __init__(self, sharded: ShardedPlacement | None = None) -> None:
        self.variables: list[Variable] = []
        self._sharded = sharded

    def create(
        self, request: VariableRequest, strategy: StrategyLike, colocate_with: object
    ) -> Variable:
        like = _begin(request)
        if request.synchronization is VariableSynchronization.ON_READ:
            variable = _on_read(request, strategy, like)
        else:
            variable = self._divided(request, strategy, like, colocate_with)
            if variable is None:
                variable = _mirrored(request, strategy, like, colocate_with)
        self.variables.append(variable)
        return variable

    def _divided(
        self,
        request: VariableRequest,
        strategy: StrategyLike,
        like: jax.ShapeDtypeStruct,
        colocate_with: object,
    ) -> MirroredVariable | None:
        """Return a variable that is divided over the replicas, or None if it stays whole."""
        placement, topology = self._sharded, strategy.topology
        if placement is None:
            return None
        division = placement.division(like, topology, colocate_with)
        if division is None:
            return None
        shape = list(like.shape)
        shape[division.axis] = division.chunk * division.parts
        parts = _described(shape, like.dtype, NamedSharding(topology.mesh, division.spec))
        return MirroredVariable.of_parts(
            request, strategy, like.shape, parts, division, placement.regather
        )

    def devices(self, topology: Topology) -> tuple[jax.Device, ...]:
        return topology.local_devices

    def initial(self, make: Callable[..., Nest], *variables: Variable) -> Nest:
        values = (jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables)
        return jax.eval_shape(make, *values)


@final
class _NothingRuns(Executor):
    """An executor that runs nothing, as there are no devices to run on."""

    def run(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> NoReturn:
        raise ContextError(
            "`run` was called while a program is planned, for devices that are not there. Current "
            f"context: {frame}. Call it in the step function that the program returns."
        )


def _begin(request: VariableRequest) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of the initial value, without computing it."""
    value = request.initial_value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, request.dtype or value.dtype)
    return jax.eval_shape(request.initial_array_or_tracer)


def _mirrored(
    request: VariableRequest,
    strategy: StrategyLike,
    like: jax.ShapeDtypeStruct,
    colocate_with: object,
) -> MirroredVariable:
    topology = strategy.topology
    request, spec = layout_of(request, topology, like.shape, colocate_with)
    state = _described(like.shape, like.dtype, NamedSharding(topology.mesh, spec))
    return MirroredVariable.of_array(request, strategy, state)


def _on_read(
    request: VariableRequest, strategy: StrategyLike, like: jax.ShapeDtypeStruct
) -> SyncOnReadVariable:
    topology = strategy.topology
    rows = like.shape[0] if like.shape else 1
    shape = (rows * topology.num_replicas, *like.shape[1:])
    state = PerReplica.from_array(
        _described(shape, like.dtype, topology.split), topology, scalars=not like.shape
    )
    return SyncOnReadVariable.of_state(request, strategy, like.shape, like.dtype, state)


def abstract_arguments(args: Sequence[Nest], topology: Topology, batch: int | None) -> Nest:
    """Return a step function's arguments for global batches: replicas' shares, without values.

    Arrays of rank 0 are the same on all replicas. Leaves that are not arrays are left unchanged.

    Args:
      args: Nests of arrays, or of `jax.ShapeDtypeStruct`.
      topology: The replicas that batches are divided over.
      batch: The number of rows of a batch; None keeps that of the arguments.
    """

    def abstract(leaf: object) -> Leaf:
        if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)):
            return leaf
        if not leaf.shape:
            return _described((), leaf.dtype, topology.replicated)
        rows, *rest = leaf.shape
        rows = rows if batch is None else batch
        if rows % topology.num_replicas:
            raise InvalidArgument(
                f"A batch of {rows} rows, of an argument of shape {tuple(leaf.shape)}, cannot be "
                f"divided over {topology.num_replicas} replicas. Arrays among the arguments are "
                "global batches; give them a first dimension that can be divided, or pass `batch`."
            )
        split = _described((rows, *rest), leaf.dtype, topology.split)
        return PerReplica.from_array(split, topology)

    return _nest.transform(abstract, tuple(args))


class _NoNumbers(jax.ShapeDtypeStruct):
    """A stand-in for an array that raises an explanatory error when its values are read."""

    @property
    def addressable_shards(self) -> NoReturn:
        raise ContextError(
            "The value of a variable was asked for while a program is planned, where variables "
            "have shapes and no numbers. Read it in the step function that the program returns."
        )


def _described(shape: Sequence[int], dtype: object, sharding: object = None) -> Any:
    return _NoNumbers(tuple(shape), dtype, sharding=sharding)
