"""The parts of a strategy, and the methods for code that does its own distributing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from replicax import _bridges, _context, _nest, cluster
from replicax._context import Frame
from replicax._deprecation import deprecated
from replicax._describing import described
from replicax._enums import ReduceOp, ReduceOpLike
from replicax._jax_compat import without_mesh
from replicax._known_bad import warn_of_defects
from replicax._typing import DeviceLike, Nest
from replicax.cluster import ClusterResolver
from replicax.collectives import (
    AcrossArrays,
    Collectives,
    CommunicationOptions,
    Hints,
    merge_options,
)
from replicax.errors import ContextError, ForeignValue, InvalidArgument, InvalidType
from replicax.execution import (
    EagerExecutor,
    Executor,
    Function,
    FunctionOfInstance,
    require_call,
    runs_as_python,
)
from replicax.input import from_tensor_slices
from replicax.strategies._combining import leaf_array, reducible
from replicax.strategies._split import by_layout, has_arrays, hint_of_whole_batches
from replicax.strategies._steps import MultiStepContext, StepRunner
from replicax.strategies._updating import Update, send_update
from replicax.strategies._variable_table import VariableTable, hint_of_whole_state, table_of
from replicax.topology import Topology, resolve_devices
from replicax.values import (
    Component,
    DistributedValues,
    Mirrored,
    PerReplica,
    place,
    require_own_values,
)
from replicax.variables import (
    MirroredPlacement,
    Variable,
    VariablePlacement,
)

if TYPE_CHECKING:
    import grain

    from replicax.input import DistributedIterator
    from replicax.strategies._strategy import Strategy

Destinations = Any  # a variable, a distributed value, an array, a device or several


class StrategyExtended:
    """The parts of a strategy, and the methods that optimizers and layers call.

    A strategy of your own names its parts here:

    >>> import replicax as rx
    >>> class FirstTwo(rx.Strategy):
    ...     '''Mirrored over the first two devices, whatever else there is.'''
    ...     def __init__(self):
    ...         topology = rx.Topology.of(["CPU:0", "CPU:1"])
    ...         super().__init__(rx.StrategyExtended(self, topology=topology))
    >>> FirstTwo().num_replicas_in_sync
    2

    Args:
      container_strategy: The strategy that these are the parts of.
      topology: Which devices form which replica.
      placement: Which variables are made, and where; mirrored ones by default.
      executor: How functions are run on the replicas.
      communication_options: How values are combined by calls that do not say so themselves.
      cluster_resolver: The resolver of the processes, if there are several.
    """

    def __init__(
        self,
        container_strategy: Strategy,
        *,
        topology: Topology,
        placement: VariablePlacement | None = None,
        executor: Executor | None = None,
        communication_options: CommunicationOptions | None = None,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        warn_of_defects(device.platform for device in topology.local_devices)
        self._strategy = container_strategy
        self._topology = topology
        self._placement = MirroredPlacement() if placement is None else placement
        self._executor = EagerExecutor() if executor is None else executor
        self._collectives = AcrossArrays(topology)
        self._communication_options = communication_options or CommunicationOptions()
        self._cluster_resolver = cluster_resolver
        self._steps = StepRunner(container_strategy, self._executor)
        self._hinted_of_batches = False
        # The live variables, in the order of creation. By id, because dictionaries compare their
        # keys, and `==` of variables compares elements.
        self._variables: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()

    # The parts.

    @property
    def topology(self) -> Topology:
        """The devices that form each replica."""
        return self._topology

    @property
    def placement(self) -> VariablePlacement:
        """The part that decides which kind of variable to create, and where."""
        return self._placement

    @property
    def collectives(self) -> Collectives:
        """The part that combines values across replicas."""
        return self._collectives

    @property
    def communication_options(self) -> CommunicationOptions:
        """The options for combining values when a call gives none."""
        return self._communication_options

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the cluster; None for a strategy of one process."""
        return self._cluster_resolver

    # Facts.

    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        """The local devices that replicas compute on."""
        return self._topology.local_devices

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The local devices that hold variables."""
        return self._placement.devices(self._topology)

    @property
    def experimental_between_graph(self) -> bool:
        """True if every worker builds its own program."""
        return self._topology.spans_processes

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Always False: shapes may change from step to step."""
        return False

    @property
    def experimental_should_init(self) -> bool:
        """True if this process should initialize variables."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """True if this process should write checkpoints, as the first worker does."""
        return self._first_worker

    @property
    def should_save_summary(self) -> bool:
        """True if this process should write summaries, as the first worker does."""
        return self._first_worker

    @property
    def _first_worker(self) -> bool:
        return not self._topology.spans_processes or cluster.current().members.index == 0

    # Running.

    def call_for_each_replica(
        self,
        fn: Callable[..., Nest],
        args: Sequence[Nest] = (),
        kwargs: Mapping[str, Nest] | None = None,
    ) -> Nest:
        """Call `fn` once on every replica; the same as `Strategy.run`."""
        return self.execute("call_for_each_replica", fn, args, kwargs)

    @deprecated("Use `strategy.run`, in a loop or in an `rx.function`.")
    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[..., Nest],
        iterator: DistributedIterator,
        iterations: int = 1,
        initial_loop_values: Mapping[str, Nest] | None = None,
    ) -> MultiStepContext:
        """Call `fn(context, inputs)` for the next elements of an iterator, one after another.

        Given an `rx.function`, the steps are one program: a `lax.scan` over the elements, which are
        all on the devices at the same time. Where the replicas' shapes differ, the steps run one by
        one.

        Args:
          fn: Runs in cross-replica context, and calls `strategy.run` itself. `context` is a
            `MultiStepContext`, for its outputs.
          iterator: An iterator over a distributed dataset.
          iterations: The number of steps.
          initial_loop_values: The values, by name, of outputs that the last step does not set.

        Returns:
          The context of the last step.
        """
        return self._steps.run(fn, iterator, iterations, initial_loop_values)

    @without_mesh
    def execute(
        self,
        method: str,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest] | None,
    ) -> Nest:
        """Check a call made through `method`, and hand it to the executor."""
        _bridges.load()
        require_call(method, fn, args)
        frame = _context.cross_replica(self._strategy, method)
        require_own_values((args, kwargs), self._topology, method)
        args, kwargs = self._divided(args, kwargs or {})
        if isinstance(fn, FunctionOfInstance):
            fn, args = fn.function, (fn.instance, *args)
        if frame.runs is not None and frame.program is None and not isinstance(fn, Function):
            fn = frame.runs.compiled(fn)
        if isinstance(fn, Function):
            if not runs_as_python(frame):
                return fn._call(self._strategy, frame, tuple(args), dict(kwargs))
            fn = fn.python_function
        executor = self._executor
        if frame.program is not None and not executor.traceable:
            executor = frame.program.executor
        return executor.run(self._strategy, frame, fn, args, kwargs)

    def _divided(
        self, args: Sequence[Nest], kwargs: Mapping[str, Nest]
    ) -> tuple[Sequence[Nest], Mapping[str, Nest]]:
        """Return the arguments, with per-replica values for arrays that are split over replicas."""
        replicas = self._topology.num_replicas
        if replicas == 1 or not has_arrays((args, kwargs)):
            return args, kwargs
        args, kwargs = by_layout((args, kwargs), self._topology)
        if not self._hinted_of_batches:
            self._hinted_of_batches = hint_of_whole_batches([*args, *kwargs.values()], replicas)
        return args, kwargs

    # Combining.

    def reduce_to(
        self,
        reduce_op: ReduceOpLike,
        value: Any,
        destinations: Destinations,
        experimental_hints: Hints = None,
        *,
        options: Hints = None,
    ) -> object:
        """Combine `value` over the replicas, and copy the result to `destinations`.

        Args:
          reduce_op: A `ReduceOp`, or its name.
          value: A per-replica value. One that is the same on all replicas is copied unchanged, or
            refused if the op would count it once per replica (SUM).
          destinations: Where the result is wanted: a variable, a distributed value, or one or more
            devices. Passing `value` itself makes it an all-reduce.
          experimental_hints: How to communicate.
          options: The newer name of `experimental_hints`.

        Returns:
          A `Mirrored` value, or an array if there is one destination.
        """
        return self._reduce_all(
            "reduce_to", reduce_op, [(value, destinations)], options, experimental_hints
        )[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOpLike,
        value_destination_pairs: Sequence[tuple[Any, Destinations]],
        experimental_hints: Hints = None,
        *,
        options: Hints = None,
    ) -> list[object]:
        """Call `reduce_to` for many pairs at once, which is faster."""
        return self._reduce_all(
            "batch_reduce_to", reduce_op, value_destination_pairs, options, experimental_hints
        )

    @without_mesh
    def _reduce_all(
        self,
        method: str,
        reduce_op: ReduceOpLike,
        pairs: Sequence[tuple[Any, Destinations]],
        options: Hints,
        hints: Hints,
    ) -> list[object]:
        op = ReduceOp.parse(reduce_op)
        merged = merge_options(options, hints, self._communication_options)
        frame = _context.cross_replica(self._strategy, method)
        pairs = list(pairs)
        require_own_values([value for value, _ in pairs], self._topology, method)
        targets = [self._target(destinations) for _, destinations in pairs]
        values = reducible(self._strategy, op, [value for value, _ in pairs], method)
        with _context.entered(frame):
            distributed = [value for value in values if value is not None]
            reduced = iter(self._strategy.collectives.reduce(op, distributed, merged))
            return [
                self._deliver(value if per_replica is None else next(reduced), target)
                for (value, _), per_replica, target in zip(pairs, values, targets, strict=True)
            ]

    @without_mesh
    def broadcast_to(self, tensor: Any, destinations: Destinations) -> Any:
        """Copy an array to `destinations`: `Mirrored`, or an array if there is one device."""
        frame = _context.cross_replica(self._strategy, "broadcast_to")
        if isinstance(tensor, PerReplica):
            raise InvalidType(
                "`broadcast_to` copies one array; got a PerReplica value. Use `reduce_to` for it."
            )
        with _context.entered(frame):
            return self._deliver(tensor, self._target(destinations))

    def _target(self, destinations: Destinations) -> tuple[tuple[jax.Device, ...], bool]:
        """Return the local destination devices, and whether there is only one on all workers."""
        devices = self._devices_of(destinations)
        everywhere = devices == self._topology.local_devices and self._topology.spans_processes
        named = isinstance(destinations, (str, jax.Device))
        return devices, len(devices) == 1 and (named or not everywhere)

    def _deliver(self, value: Any, target: tuple[tuple[jax.Device, ...], bool]) -> object:
        devices, single = target
        if single:
            return place(leaf_array(value), self._topology.local_sharding_of(devices[0]))
        held = value.topology if isinstance(value, Mirrored) else None
        if held is not None and held.local_devices == devices:
            return value
        topology = self._topology
        if devices != topology.local_devices:
            topology = Topology.of(devices)
        return Mirrored.from_array(topology.replicate(leaf_array(value)), topology)

    def _devices_of(self, destinations: Destinations) -> tuple[jax.Device, ...]:
        if isinstance(destinations, Variable):
            if self._placement.sends_updates:  # values for it travel from this process's device
                return self._topology.local_devices
            return tuple(copy.device for copy in destinations.values)
        if isinstance(destinations, DistributedValues):
            return (destinations.topology or self._topology).local_devices
        if isinstance(destinations, (str, jax.Device)):
            return resolve_devices([destinations])
        if isinstance(destinations, (tuple, list)) and all(
            isinstance(device, (str, jax.Device)) for device in destinations
        ):
            return resolve_devices(destinations)
        if isinstance(destinations, jax.Array):
            held = destinations.devices()
            firsts = tuple(device for device in self._topology.local_devices if device in held)
            return firsts or tuple(sorted(held, key=lambda device: device.id))
        raise InvalidType(
            f"Destinations are a variable, a distributed value, a device or several; got "
            f"{described(destinations)}."
        )

    # Input.

    @deprecated("Use `rx.from_tensor_slices(arrays)`.")
    def experimental_make_numpy_dataset(
        self, numpy_input: Nest, session: None = None
    ) -> grain.MapDataset:
        """Make a Grain dataset of the rows of a nest of arrays, as `rx.from_tensor_slices` does."""
        if session is not None:
            raise InvalidArgument(
                f"`session` must be None; got {described(session)}. There are no sessions on JAX: "
                "what is called has been run when it returns."
            )
        return from_tensor_slices(numpy_input)

    # Variables.

    def update(
        self,
        var: Variable,
        fn: Callable[..., Nest],
        args: Sequence[Nest] = (),
        kwargs: Mapping[str, Nest] | None = None,
        group: bool = True,
    ) -> Nest:
        """Call `fn(copy, *args, **kwargs)` for every copy of `var`, on the copy's device.

        Mirrored values and variables in `args` and `kwargs` reach `fn` as the copy on the same
        device, per-replica values as the component of the replica that the copy belongs to, or of
        the first replica if there is a single copy. Arguments that differ between replicas make the
        copies differ. If `fn` fails, no copy is changed.

        Args:
          var: A variable of this strategy.
          fn: Changes the copy it is given.
          args: Further arguments.
          kwargs: Keyword arguments, likewise.
          group: Whether to merge the results; otherwise each leaf is a list, one per copy.
        """
        frame = _context.cross_replica(self._strategy, "update")
        if not isinstance(var, Variable):
            raise InvalidType(f"`update` changes a variable; got {described(var)}.")
        self._require_own(var, "update")
        require_call("update", fn, args)
        if self._placement.sends_updates:
            arguments = ((var, *args), dict(kwargs or {}))
            return send_update(self._placement, frame, fn, arguments, group)
        devices = tuple(copy.device for copy in var.values)
        return self._update("update", frame, devices, fn, (var, *args), kwargs, group)

    def update_non_slot(
        self,
        colocate_with: DeviceLike | Sequence[DeviceLike],
        fn: Callable[..., Nest],
        args: Sequence[Nest] = (),
        kwargs: Mapping[str, Nest] | None = None,
        group: bool = True,
    ) -> Nest:
        """Call `fn(*args, **kwargs)` on each of the devices that `non_slot_devices` returned."""
        frame = _context.cross_replica(self._strategy, "update_non_slot")
        require_call("update_non_slot", fn, args)
        devices = self._devices_of(colocate_with)
        return self._update("update_non_slot", frame, devices, fn, args, kwargs, group)

    @without_mesh
    def _update(
        self,
        method: str,
        frame: Frame,
        devices: tuple[jax.Device, ...],
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest] | None,
        group: bool,
    ) -> Nest:
        arguments = (tuple(args), dict(kwargs or {}))
        for leaf in _nest.leaves(arguments):
            if isinstance(leaf, Variable):
                self._require_own(leaf, method)
        return Update(self._strategy, method, devices, fn, group).run(frame, arguments)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[jax.Device, ...]:
        """Return the devices for an optimizer's variables that belong to no other variable."""
        return self.parameter_devices

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Put variables created inside on the devices of another variable, or on given devices."""
        frame = _context.current()
        if frame.strategy is not self._strategy.identity:
            raise ContextError(
                f"`colocate_vars_with` needs the scope of {self._strategy!r}. Current context: "
                f"{frame}. Put it inside `with strategy.scope():`."
            )
        if isinstance(colocate_with_variable, Variable):
            self._require_own(colocate_with_variable, "colocate_vars_with")
        elif self._devices_of(colocate_with_variable) != self.parameter_devices:
            raise InvalidArgument(
                f"`colocate_vars_with` takes a variable, or the devices that `non_slot_devices` "
                f"gives: {self.parameter_devices}. Got {described(colocate_with_variable)}."
            )
        with _context.entered(replace(frame, colocate_with=colocate_with_variable, partition=None)):
            yield

    @contextmanager
    def partition(self, partition_dimensions: Sequence[int]) -> Iterator[None]:
        """Divide variables created inside over the logical devices of each replica.

        The state that an optimizer keeps for them is divided too. An initial value given as a
        callable is made in parts, and is nowhere held as a whole.

        Args:
          partition_dimensions: Into how many parts each dimension is divided; their product is the
            number of logical devices.

        >>> import jax.numpy as jnp, replicax as rx
        >>> strategy = rx.MirroredStrategy(
        ...     ["CPU:0", "CPU:1", "CPU:2", "CPU:3"], logical_devices_per_replica=2)
        >>> with strategy.scope(), strategy.extended.partition([1, 2]):
        ...     weight = rx.Variable(lambda: jnp.zeros((512, 1024)))
        >>> weight.value.sharding.shard_shape(weight.shape)
        (512, 512)
        """
        frame = _context.cross_replica(self._strategy, "partition")
        parts = self._topology.checked_partition(partition_dimensions)
        with _context.entered(replace(frame, partition=parts)):
            yield

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Tell whether `v` was created in the scope of this strategy."""
        return _known_variable("variable_created_in_scope", v).strategy is self._strategy.identity

    def describe_variables(self) -> VariableTable:
        """Return a table of this strategy's variables, and the bytes of each that a device holds.

        It has every live variable in the order of creation, including the slots of optimizers.
        Variables of Keras and Flax are in it once the strategy has used them. Each worker lists its
        own. The table of the default strategy is empty: variables created outside of every scope
        belong to no strategy.

        Under `FullyShardedStrategy`, an `rx.errors.PerformanceHint` warns once if more than a tenth
        of a state of at least 1 MiB is kept whole.

        >>> import jax.numpy as jnp, replicax as rx
        >>> strategy = rx.FullyShardedStrategy(["CPU:0", "CPU:1"])
        >>> with strategy.scope():
        ...     weight = rx.Variable(jnp.zeros((512, 64)), name="weight")
        ...     bias = rx.Variable(jnp.zeros(64), name="bias")
        >>> print(strategy.extended.describe_variables())
        2 variables
         name     shape       dtype     layout                    bytes   per device
        ─────────────────────────────────────────────────────────────────────────────
         weight   (512, 64)   float32   sharded, dim 0 in 2     128 KiB       64 KiB
         bias     (64,)       float32   replicated                256 B        256 B
        <BLANKLINE>
         in all                                               128.2 KiB    64.25 KiB
        """
        table = table_of(list(self._variables.values()), self._topology)
        if self._placement.divides and self._topology.num_replicas > 1:
            hint_of_whole_state(self._strategy, table)
        return table

    def read_var(self, v: Variable) -> jax.Array:
        """Return the value of a variable; of an ON_READ variable, the aggregate."""
        return _known_variable("read_var", v).value

    def value_container(self, value: Any) -> object:
        """Return the variable that `value` is a copy of; anything else is returned as is."""
        return value.container if isinstance(value, Component) else value

    def _require_own(self, variable: Variable, method: str) -> None:
        if not self.variable_created_in_scope(variable):
            owner = "outside every scope" if variable.strategy is None else repr(variable.strategy)
            raise ForeignValue(
                f"`{method}` of {self._strategy!r} got variable {variable.name!r}, which was "
                f"created by another strategy ({owner}). Create it in this strategy's scope."
            )


def _known_variable(method: str, given: object) -> Variable:
    """Return the variable that was given, or that stands for one of another library."""
    variable = _bridges.variable_of(given)
    if not isinstance(variable, Variable):
        raise InvalidType(
            f"`{method}` takes a variable; got {described(given)}. Give one that was created in "
            "the scope of a strategy."
        )
    return variable
