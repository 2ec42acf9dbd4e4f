"""A strategy over devices that are not there: its variables have shapes, and no numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final

import jax
import numpy as np
from jax.sharding import NamedSharding

from replicax import _nest
from replicax._context import Frame
from replicax._enums import VariableSynchronization
from replicax._typing import Nest
from replicax.errors import ContextError, InvalidArgument
from replicax.execution import Executor
from replicax.strategies import Strategy, StrategyExtended
from replicax.topology import Topology
from replicax.values import PerReplica
from replicax.variables import (
    MirroredVariable,
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
    """What a program gets that is planned: a strategy over described devices.

    Args:
      topology: The devices.
    """

    def __init__(self, topology: Topology) -> None:
        self._made = AbstractPlacement()
        extended = StrategyExtended(
            self, topology=topology, placement=self._made, executor=_NothingRuns()
        )
        super().__init__(extended)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All that were made, in that order."""
        return tuple(self._made.variables)


@final
class AbstractPlacement(VariablePlacement):
    """Makes variables whose state is a `jax.ShapeDtypeStruct` where others have an array."""

    def __init__(self) -> None:
        self.variables: list[Variable] = []

    def create(
        self, request: VariableRequest, strategy: StrategyLike, colocate_with: Any
    ) -> Variable:
        made = _on_read if request.synchronization is _ON_READ else _mirrored
        variable = made(request, strategy, _begin(request), colocate_with)
        self.variables.append(variable)
        return variable

    def devices(self, topology: Topology) -> tuple[jax.Device, ...]:
        return topology.local_devices

    def initial(self, make: Callable[..., Nest], *variables: Variable) -> Nest:
        values = (jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables)
        return jax.eval_shape(make, *values)


@final
class _NothingRuns(Executor):
    """There is nothing that could run."""

    def run(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., Any],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> NoReturn:
        raise ContextError(
            "`run` was called while a program is planned, for devices that are not there. Current "
            f"context: {frame}. Call it in the step function that the program returns."
        )


_ON_READ = VariableSynchronization.ON_READ


def _begin(request: VariableRequest) -> jax.ShapeDtypeStruct:
    """The shape and dtype of the initial value, of which no number is computed."""
    value = request.initial_value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, request.dtype or value.dtype)
    return jax.eval_shape(request.initial_array_or_tracer)


def _mirrored(
    request: VariableRequest,
    strategy: StrategyLike,
    like: jax.ShapeDtypeStruct,
    colocate_with: Any,
) -> MirroredVariable:
    topology = strategy.topology
    request, spec = layout_of(request, topology, like.shape, colocate_with)
    state = _described(like.shape, like.dtype, NamedSharding(topology.mesh, spec))
    return MirroredVariable.of_array(request, strategy, state)


def _on_read(
    request: VariableRequest,
    strategy: StrategyLike,
    like: jax.ShapeDtypeStruct,
    colocate_with: Any,
) -> SyncOnReadVariable:
    topology = strategy.topology
    rows = like.shape[0] if like.shape else 1
    shape = (rows * topology.num_replicas, *like.shape[1:])
    state = PerReplica.from_array(
        _described(shape, like.dtype, topology.split), topology, scalars=not like.shape
    )
    return SyncOnReadVariable._build(request, strategy, state, _described(like.shape, like.dtype))


def abstract_arguments(args: Sequence[Nest], topology: Topology, batch: int | None) -> Nest:
    """What a step function gets for global batches: their shares, of which no number is there.

    Arrays of rank 0 are the same on all replicas. What is no array stays as it is.

    Args:
      args: Nests of arrays, or of `jax.ShapeDtypeStruct`.
      topology: Over whose replicas batches are divided.
      batch: How many rows a batch has; None leaves them as they are.
    """

    def abstract(leaf: Any) -> Any:
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
    """What stands for an array, and says so to who wants to look into it."""

    @property
    def addressable_shards(self) -> NoReturn:
        raise ContextError(
            "The value of a variable was asked for while a program is planned, where variables "
            "have shapes and no numbers. Read it in the step function that the program returns."
        )


def _described(shape: Sequence[int], dtype: Any, sharding: Any = None) -> Any:
    return _NoNumbers(tuple(shape), dtype, sharding=sharding)
