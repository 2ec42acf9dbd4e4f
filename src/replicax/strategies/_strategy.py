"""`Strategy`, with the methods that users call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from replicax import _bridges, _context, _nest
from replicax._context import ContextKind
from replicax._describing import described
from replicax._enums import GradientReduction, GradientReductionLike, ReduceOp, ReduceOpLike
from replicax._jax_compat import uncommitted, without_mesh
from replicax._typing import ArrayLike, DatasetLike, Leaf, Nest, Values
from replicax.collectives import regroup
from replicax.errors import ContextError, InvalidArgument, InvalidType, NotPicklable
from replicax.execution import gradient_reduction_of, set_gradient_reduction
from replicax.input import (
    DistributedDataset,
    InputContext,
    InputOptions,
    distribute,
    distribute_from_function,
)
from replicax.strategies._combining import Axis, gather_nest, reduce_nest
from replicax.strategies._layout import lay_out
from replicax.strategies._split import split_nest
from replicax.values import DistributedValues, Mirrored, PerReplica, place, require_own_values
from replicax.variables import Variable, agree_on_beginnings

if TYPE_CHECKING:
    import grain

    from replicax._typing import StrategyLike
    from replicax.cluster import ClusterResolver
    from replicax.collectives import Collectives
    from replicax.execution import Executor
    from replicax.strategies._extended import StrategyExtended
    from replicax.topology import DeviceOrSharding, Topology
    from replicax.variables import VariablePlacement

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class ValueContext:
    """The replica for which `experimental_distribute_values_from_function` wants a value."""

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of `run` that the reference has for TPUs.

    Here shapes may differ between replicas anyway, and XLA's options are set through JAX, so all
    are accepted and have no effect.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: object = None


class Strategy:
    """The object that decides on which devices, and in how many replicas, a step runs.

    It is made of parts, which the `StrategyExtended` given to it names. A strategy of your own is
    a subclass that chooses them; see `StrategyExtended`.

    >>> import numpy as np, replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     weight = rx.Variable(1.0)
    >>> def replica_fn(x):
    ...     return x * weight
    >>> rows = np.float32([[1, 2], [3, 4]])
    >>> batch = strategy.experimental_distribute_values_from_function(
    ...     lambda context: rows[context.replica_id_in_sync_group])
    >>> result = strategy.run(replica_fn, args=(batch,))
    >>> result
    PerReplica:{
      0: Array([1., 2.], dtype=float32),
      1: Array([3., 4.], dtype=float32)
    }
    >>> strategy.reduce("SUM", result, axis=None)
    Array([4., 6.], dtype=float32)
    >>> strategy.reduce("MEAN", result, axis=0)
    Array(2.5, dtype=float32)
    """

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended

    @property
    def extended(self) -> StrategyExtended:
        """The methods for libraries that distribute by themselves, such as optimizers."""
        return self._extended

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster; None for a strategy of one process."""
        return self._extended.cluster_resolver

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are combined."""
        return self.topology.num_replicas

    @property
    def topology(self) -> Topology:
        """The devices that form each replica."""
        return self._extended.topology

    @property
    def placement(self) -> VariablePlacement:
        """The part that decides which kind of variable to create, and where."""
        return self._extended.placement

    @property
    def _executor(self) -> Executor:
        return self._extended._executor

    def _note_variable(self, variable: Variable) -> None:
        self._extended._variables[id(variable)] = variable

    @property
    def collectives(self) -> Collectives:
        """The part that combines the replicas' values."""
        program = _context.current().program
        if program is not None:
            program.note(self.topology)
            return program.collectives or self._extended.collectives
        return self._extended.collectives

    @property
    def gradient_reduction(self) -> GradientReduction:
        """The way optimizers reduce gradients over the replicas: SUM unless set otherwise.

        In functions given to `run`, it applies to every `rx.Optimizer` without a `reduction` of its
        own and to the optimizers of Keras and Flax NNX. Set MEAN for losses that are means over the
        replica's own rows (`.mean()`), and NONE for gradients that are already equal on all
        replicas. Strings are case-insensitive. Compiled functions are retraced after a change.

        >>> import replicax as rx
        >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> strategy.gradient_reduction = "mean"
        >>> strategy.gradient_reduction
        <GradientReduction.MEAN: 'MEAN'>
        """
        return gradient_reduction_of(self)

    @gradient_reduction.setter
    def gradient_reduction(self, reduction: GradientReductionLike) -> None:
        parsed = GradientReduction.parse(reduction)
        frame = _context.current()
        inside = frame.kind is not ContextKind.CROSS_REPLICA and frame.strategy is not None
        if inside or frame.program is not None:
            raise ContextError(
                "`gradient_reduction` was set in a function given to `run`, or while a function "
                f"was traced. Current context: {frame}. Set it outside, before the function is "
                "called; or give the optimizer a reduction of its own: "
                "`rx.Optimizer(tx, reduction=...)`."
            )
        set_gradient_reduction(self, parsed)

    @property
    def identity(self) -> StrategyLike | None:
        """The object that stands for this strategy in a context."""
        return self

    def scope(self) -> Scope:
        """Make this strategy current, in cross-replica context: `with strategy.scope(): ...`.

        Variables created inside are the strategy's own. Enter it again as often as you like, but
        not inside another strategy's scope.
        """
        return Scope(self)

    def run(
        self,
        fn: Callable[..., Values],
        args: Sequence[Nest] = (),
        kwargs: Mapping[str, Nest] | None = None,
        options: RunOptions | None = None,
    ) -> Values:
        """Call `fn` once on every replica and merge the results.

        Args:
          fn: Runs in replica context; may call `rx.get_replica_context()`.
          args: Its arguments. For distributed values, each replica gets its own component.
          kwargs: Its keyword arguments, likewise.
          options: Accepted for the sake of programs written for the reference.

        Returns:
          The nest that `fn` returns. Leaves that differ are `PerReplica`; an object that all
          replicas return is that object; with one replica, leaves are as `fn` returned them.
        """
        if options is not None and not isinstance(options, RunOptions):
            raise InvalidType(f"`options` of `run` must be a RunOptions; got {described(options)}.")
        return self._extended.execute("run", fn, args, kwargs)

    @overload
    def reduce(self, reduce_op: ReduceOpLike, value: ArrayLike, axis: Axis) -> jax.Array: ...
    @overload
    def reduce(self, reduce_op: ReduceOpLike, value: Values, axis: Axis) -> Values: ...
    @without_mesh
    def reduce(self, reduce_op: ReduceOpLike, value: Nest, axis: Axis) -> Nest:
        """Combine a per-replica value, or a nest of them, into plain arrays.

        Args:
          reduce_op: A `ReduceOp`, or its name.
          value: What `run` returned.
          axis: None combines the replicas' values element by element. A dimension, or several, is
            combined over as well; MEAN then divides by the actual number of elements.
        """
        op = ReduceOp.parse(reduce_op)
        frame = _context.cross_replica(self, "reduce")
        require_own_values(value, self.topology, "reduce")
        with _context.entered(frame):
            return reduce_nest(self, op, value, axis)

    @overload
    def gather(self, value: ArrayLike, axis: int) -> jax.Array: ...
    @overload
    def gather(self, value: Values, axis: int) -> Values: ...
    @without_mesh
    def gather(self, value: Nest, axis: int) -> Nest:
        """Concatenate the replicas' values along `axis` into one plain array.

        Their shapes may differ in that dimension only, and must have at least one dimension.
        """
        frame = _context.cross_replica(self, "gather")
        require_own_values(value, self.topology, "gather")
        with _context.entered(frame):
            return gather_nest(self, value, axis)

    @overload
    def split(self, nest: ArrayLike) -> PerReplica: ...
    @overload
    def split(self, nest: tuple[ArrayLike, ...]) -> tuple[PerReplica, ...]: ...
    @overload
    def split(self, nest: Mapping[Key, ArrayLike]) -> dict[Key, PerReplica]: ...
    @overload
    def split(self, nest: Nest) -> Nest: ...
    @without_mesh
    def split(self, nest: Nest) -> Nest:
        """Divide the rows of a nest of plain arrays over the replicas.

        Each replica gets the same number of rows, or the first few one more, as with the batches of
        a distributed dataset. If there are several workers, all must pass the same arrays.

        Args:
          nest: Arrays with equally many rows, such as a batch `(features, labels)`.

        Returns:
          The nest, with a per-replica value for each array.

        >>> import numpy as np, replicax as rx
        >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
        >>> batch = {"x": np.ones((5, 2)), "y": np.arange(5)}
        >>> result = strategy.run(lambda batch: batch["y"].sum(), args=(strategy.split(batch),))
        >>> [int(total) for total in strategy.experimental_local_results(result)]
        [3, 7]
        """
        with _context.entered(_context.cross_replica(self, "split")):
            return split_nest(nest, self.topology)

    @overload
    def experimental_local_results(self, value: Variable) -> tuple[Variable, ...]: ...
    @overload
    def experimental_local_results(self, value: PerReplica | Mirrored) -> tuple[jax.Array, ...]: ...
    @overload
    def experimental_local_results(self, value: Values) -> tuple[Values, ...]: ...
    def experimental_local_results(self, value: Nest) -> tuple[Nest, ...]:
        """Return the components of this process's replicas; for a plain value, a tuple of it.

        Arrays among them can be combined with each other: JAX brings them to one device.
        """
        distributed = isinstance(value, (DistributedValues, Variable))
        if not distributed and (value is None or _nest.is_leaf(value)):
            return (value,)
        if self.topology.spans_processes and _context.current().program is not None:
            raise ContextError(
                "`experimental_local_results` was called in an `rx.function`, which is one program "
                "for all workers, and what is local differs between them. Return the value, and "
                "take it apart outside; or use `strategy.gather`."
            )
        if distributed:
            return tuple(_movable(component) for component in value.values)

        def component(leaf: Leaf, index: int) -> Leaf:
            if not isinstance(leaf, (DistributedValues, Variable)):
                return leaf
            # One copy may serve all replicas.
            return _movable(leaf.values[min(index, len(leaf.values) - 1)])

        return tuple(
            _nest.transform(lambda leaf, index=index: component(leaf, index), value)
            for index in range(len(self.topology.local_replicas))
        )

    @overload
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], ArrayLike]
    ) -> PerReplica: ...
    @overload
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Values]
    ) -> Values: ...
    @without_mesh
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Nest]
    ) -> Nest:
        """Make a per-replica value by calling `value_fn` with a `ValueContext` for each replica."""
        if not callable(value_fn):
            raise InvalidType(f"`value_fn` must be a function; got {described(value_fn)}.")
        topology = self.topology
        with _context.entered(
            _context.cross_replica(self, "experimental_distribute_values_from_function")
        ):
            nests = [
                _nest.transform(
                    lambda leaf, sharding=sharding: _on_device(leaf, sharding),
                    value_fn(ValueContext(replica, topology.num_replicas)),
                )
                for replica, sharding in zip(
                    topology.local_replicas, topology.local_shardings, strict=True
                )
            ]
        return regroup(nests, topology, always_wrap=True)

    def experimental_distribute_dataset(
        self, dataset: DatasetLike, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Divide each batch of a dataset over the replicas; workers share the dataset.

        Args:
          dataset: A dataset of global batches: a Grain dataset, a `tf.data.Dataset`, a PyTorch
            `DataLoader`, a list or another re-iterable, or a function that returns an iterator.
          options: How to distribute it.

        Returns:
          A dataset whose elements have a part for each replica. It is read, and brought to the
          devices, ahead of its use.
        """
        _context.cross_replica(self, "experimental_distribute_dataset")
        return distribute(dataset, self.topology, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], DatasetLike], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Give every replica one element per step, from a dataset that `dataset_fn` makes.

        Args:
          dataset_fn: Called once for each worker with an `rx.InputContext`. Returns a dataset of
            batches for one replica each, which have
            `input_context.get_per_replica_batch_size(global_batch_size)` rows.
          options: How to distribute it.
        """
        _context.cross_replica(self, "distribute_datasets_from_function")
        return distribute_from_function(dataset_fn, self.topology, options)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], DatasetLike], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Call `distribute_datasets_from_function`; this is its older name."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_make_numpy_dataset(self, numpy_input: Nest) -> grain.MapDataset:
        """Make a Grain dataset of the rows of a nest of arrays, as `rx.from_tensor_slices` does."""
        return self._extended.experimental_make_numpy_dataset(numpy_input)

    def experimental_assign_to_logical_device(
        self, tensor: jax.Array, logical_device_id: int
    ) -> jax.Array:
        """Return the same tensor: XLA cannot make one logical device do all the work on it.

        It is on all logical devices of the replica, as with
        `experimental_replicate_to_logical_devices`.

        Args:
          tensor: A replica's own value.
          logical_device_id: Which logical device of a replica; only checked.
        """
        count = self.topology.logical_devices_per_replica
        if not isinstance(logical_device_id, int) or not 0 <= logical_device_id < count:
            raise InvalidArgument(
                f"`logical_device_id` must be one of the {count} logical device(s) of a replica, "
                f"from 0 to {count - 1}; got {described(logical_device_id)}."
            )
        return self.experimental_replicate_to_logical_devices(tensor)

    def experimental_split_to_logical_devices(
        self, tensor: jax.Array, partition_dimensions: Sequence[int]
    ) -> jax.Array:
        """Return the same tensor, divided over the logical devices of the replica.

        Values computed from it are divided in the same way where XLA finds it worthwhile.

        Args:
          tensor: A replica's own value.
          partition_dimensions: Into how many parts each dimension is divided; their product is the
            number of logical devices.
        """
        array = jnp.asarray(tensor)
        return lay_out(array, self.topology.partition(partition_dimensions, array.shape), self)

    def experimental_replicate_to_logical_devices(self, tensor: jax.Array) -> jax.Array:
        """Return the same tensor, on all logical devices of the replica."""
        return lay_out(jnp.asarray(tensor), PartitionSpec(), self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_replicas_in_sync})"

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(
            f"{self!r} cannot be pickled: it stands for devices of this process. Make the strategy "
            "again in the other process."
        )

    def __deepcopy__(self, memo: object) -> Strategy:
        return self  # it stands for devices, of which there is one set


class Scope:
    """The context manager that `Strategy.scope` returns."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._entered = threading.local()

    def __enter__(self) -> Strategy:
        frame = _context.cross_replica(self._strategy, "scope")
        if self._strategy.identity is None:
            frame = _context.current()  # The default strategy stays in replica context.
        entered = _context.entered(frame)
        entered.__enter__()
        self._entered.stack = [*getattr(self._entered, "stack", ()), entered]
        _bridges.follow()
        return self._strategy

    def __exit__(self, *exception: object) -> None:
        self._entered.stack.pop().__exit__(*exception)
        _bridges.follow()
        if exception[0] is None:
            agree_on_beginnings()


def _movable(component: jax.Array) -> Leaf:
    return uncommitted(component) if isinstance(component, jax.Array) else component


def _on_device(leaf: Leaf, sharding: DeviceOrSharding) -> Leaf:
    """Return numbers as an array on the replica's device, and other objects unchanged."""
    if isinstance(leaf, (str, bytes)):  # `jnp.asarray` would take it for a dtype's name.
        return leaf
    try:
        return place(jnp.asarray(leaf), sharding)
    except (TypeError, OverflowError):
        return leaf
