"""The planner: it builds a step for described devices, compiles it, and reads off its needs."""

from __future__ import annotations

import numbers
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
from jax.experimental.layout import Format

from replicax import _nest
from replicax._describing import described
from replicax._typing import Nest
from replicax.errors import InvalidArgument, InvalidType
from replicax.execution import Function, FunctionOfInstance
from replicax.planning._abstract import PlannedStrategy, abstract_arguments
from replicax.planning._collectives import find_collectives
from replicax.planning._estimate import estimate
from replicax.planning._flops import count_flops
from replicax.planning._layout import padding, shard_bytes
from replicax.planning._plan import Memory, Plan, PlannedVariable, Scaling, largest_first
from replicax.planning._program_text import parse
from replicax.planning._topologies import Target, prepare, target_of
from replicax.strategies import Strategy
from replicax.topology import Topology
from replicax.values import PerReplica
from replicax.variables import ShardedPlacement, Variable, storage_of

Program = Callable[[Strategy], tuple[Callable[..., Any], Sequence[Nest]]]

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TOO_LARGE = re.compile(
    r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"
    r"|Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"
)


def plan(
    program: Program,
    topology: str = "v5e:16x16",
    computation_shape: Sequence[int] | None = None,
    batch: int | None = None,
    placement: ShardedPlacement | None = None,
) -> Plan:
    """Plan a training step: find what it needs on devices that need not exist; nothing is run.

    Args:
      program: A function that takes a strategy, creates variables in its scope, and returns
        `(step, args)`: the function that is used for training, which calls `strategy.run`, and its
        arguments. Give large variables their initial values as callables, which are then not
        computed. Arrays among the arguments, or `jax.ShapeDtypeStruct`s that stand for them, are
        global batches; those of rank 0 are the same for all replicas.
      topology: A name such as "v5e:4x4" (which requires the extra `replicax[tpu]`) or "cpu:8".
      computation_shape: The sides of a replica's block of chips; one device by default.
      batch: The number of rows of global batches, instead of that of the arguments.
      placement: `rx.parts.ShardedPlacement()` to divide the state as `rx.FullyShardedStrategy`
        does. By default every chip has the whole state, as under `rx.MirroredStrategy`.

    >>> import jax, jax.numpy as jnp, replicax as rx
    >>> def program(strategy):
    ...     with strategy.scope():
    ...         weight = rx.Variable(lambda: jnp.zeros((64, 64)), name="weight")
    ...     def replica_step(x):
    ...         return jnp.sum(x @ weight)
    ...     def step(x):
    ...         return strategy.reduce("SUM", strategy.run(replica_step, (x,)), axis=None)
    ...     return step, (jax.ShapeDtypeStruct((32, 64), jnp.float32),)
    >>> plan = rx.planning.plan(program, "cpu:4")
    >>> plan.replicas, plan.memory.variables, int(plan.flops)
    (4, 16384, 65536)
    """
    if not callable(program):
        raise InvalidType(f"A program that is planned is a function; got {described(program)}.")
    if batch is not None and (not isinstance(batch, numbers.Integral) or batch < 1):
        raise InvalidArgument(f"`batch` must be a positive number of rows; got {described(batch)}.")
    target = target_of(topology)
    devices = target.topology(computation_shape)
    if placement is not None and not isinstance(placement, ShardedPlacement):
        raise InvalidType(
            "`placement` must be an `rx.parts.ShardedPlacement`, or None for mirrored state; got "
            f"{described(placement)}."
        )
    return _Step.build(program, target, devices, batch, placement).plan()


def scaling(
    program: Program,
    topologies: Sequence[str],
    computation_shape: Sequence[int] | None = None,
    batch: int | None = None,
    placement: ShardedPlacement | None = None,
) -> Scaling:
    """Plan a step for several topologies, to compare them.

    Args:
      program: As for `plan`. It is called once for each topology.
      topologies: Their names.
      computation_shape: As for `plan`.
      batch: As for `plan`.
      placement: As for `plan`.
    """
    if not isinstance(topologies, (list, tuple)) or not topologies:
        raise InvalidType(
            f"`topologies` must be a list of names, such as ['v5e:2x2', 'v5e:4x4']; got "
            f"{described(topologies)}."
        )
    prepare(topologies)
    plans = [plan(program, name, computation_shape, batch, placement) for name in topologies]
    return Scaling(tuple(plans))


@final
@dataclass(frozen=True, slots=True)
class _Step:
    """A step that was built for described devices."""

    target: Target
    topology: Topology
    variables: tuple[Variable, ...]
    name: str
    arguments: Nest
    traced: jax.stages.Traced
    seconds: float

    @classmethod
    def build(
        cls,
        program: Program,
        target: Target,
        topology: Topology,
        batch: int | None,
        placement: ShardedPlacement | None,
    ) -> _Step:
        strategy = PlannedStrategy(topology, placement)
        begin = time.perf_counter()
        step, args = _checked(program(strategy))
        arguments = abstract_arguments(args, topology, batch)
        traced = step.trace(*arguments)
        seconds = time.perf_counter() - begin
        name = step.function.__name__ if isinstance(step, FunctionOfInstance) else step.__name__
        return cls(target, topology, strategy.variables, name, arguments, traced, seconds)

    def plan(self) -> Plan:
        begin = time.perf_counter()
        flops = count_flops(self.traced.jaxpr) / self.topology.logical_devices_per_replica
        compiled, needed = self._compile()
        seconds = time.perf_counter() - begin
        chip, sides = self.target.chip, self.target.sides
        if compiled is None:
            collectives, bytes_accessed, times = (), 0.0, None
        else:
            collectives = find_collectives(parse(compiled.as_text() or ""))
            bytes_accessed = _bytes_accessed(compiled, flops)
            times = chip and estimate(chip, sides, flops, bytes_accessed, collectives)
        return Plan(
            program=self.name,
            topology=self.target.name,
            chips=self.target.chips,
            replicas=self.topology.num_replicas,
            devices_per_replica=self.topology.logical_devices_per_replica,
            batch=self._batch(),
            memory=self._memory(compiled, needed),
            flops=flops,
            bytes_accessed=bytes_accessed,
            collectives=collectives,
            estimate=times,
            variables=largest_first([_planned(v, self.topology) for v in self.variables]),
            seconds_to_trace=self.seconds,
            seconds_to_compile=seconds,
        )

    def _compile(self) -> tuple[jax.stages.Compiled | None, float]:
        """Return the compiled program, or None and the bytes needed if it does not fit."""
        lowered = self.traced.lower()
        try:
            return lowered.compile(), 0.0
        except jax.errors.JaxRuntimeError as error:
            needed = _needed(str(error))
            if needed is None:
                raise
            return None, needed

    def _memory(self, compiled: jax.stages.Compiled | None, needed: float) -> Memory:
        chip = self.target.chip
        capacity = None if chip is None else int(chip.share(chip.usable_memory))
        variables = sum(shard_bytes(storage_of(v).lift(self.topology)) for v in self.variables)
        inputs = sum(map(shard_bytes, self._inputs()))
        if compiled is None:  # XLA reports only the total, to three digits
            known = variables + inputs
            rest = max(int(needed), (capacity or 0) + 1, known) - known
            return Memory(variables, inputs, 0, rest, 0, capacity)
        found: Any = compiled.memory_analysis()
        of_variables, of_inputs = self._padding(compiled)
        return Memory(
            variables + of_variables,
            inputs + of_inputs,
            found.output_size_in_bytes - found.alias_size_in_bytes,
            found.temp_size_in_bytes,
            found.generated_code_size_in_bytes,
            capacity,
        )

    def _padding(self, compiled: jax.stages.Compiled) -> tuple[int, int]:
        """Return the bytes that padding adds to the variables and to the inputs."""
        formats: list[Any] = jax.tree.leaves(
            compiled.input_formats, is_leaf=lambda x: isinstance(x, Format)
        )
        arrays = jax.tree.leaves(self.traced.args_info)
        paddings = [
            0  # the program does not use it
            if layout.layout is None
            else padding(layout.sharding.shard_shape(array.shape), array.dtype, layout.layout)
            for array, layout in zip(arrays, formats, strict=True)
        ]
        states = len(paddings) - len(self._inputs())
        return sum(paddings[:states]), sum(paddings[states:])

    def _inputs(self) -> list[Any]:
        """Return the arrays that represent the arguments."""
        leaves = _nest.leaves(self.arguments)
        whole = [leaf.whole if isinstance(leaf, PerReplica) else leaf for leaf in leaves]
        return [leaf for leaf in whole if isinstance(leaf, jax.ShapeDtypeStruct)]

    def _batch(self) -> int | None:
        """Return the number of rows of the first argument that has any."""
        return next((leaf.shape[0] for leaf in self._inputs() if leaf.shape), None)


def _checked(made: Any) -> tuple[Function | FunctionOfInstance, Sequence[Nest]]:
    pair = isinstance(made, tuple) and len(made) == 2
    if not (pair and callable(made[0]) and isinstance(made[1], (tuple, list))):
        raise InvalidType(
            "A program that is planned returns its step function and a tuple of arguments, "
            f"`(step, args)`; got {made!r}."
        )
    step, args = made
    return step if isinstance(step, (Function, FunctionOfInstance)) else Function(step), args


def _planned(variable: Variable, topology: Topology) -> PlannedVariable:
    state = storage_of(variable).lift(topology)
    return PlannedVariable(
        variable.name,
        variable.shape,
        str(variable.dtype),
        shard_bytes(state),
        state.sharding.is_fully_replicated,
    )


def _needed(message: str) -> float | None:
    """Return the bytes that a program needs, from the message in which XLA says it is too large."""
    found = _TOO_LARGE.search(message)
    if found is None:
        return None
    number, unit, *_ = [part for part in found.groups() if part is not None]
    return float(number) * _UNITS[unit]


def _bytes_accessed(compiled: jax.stages.Compiled, flops: float) -> float:
    """Return XLA's count, which has loop bodies once, scaled by the ratio of `flops` to XLA's."""
    costs: Any = compiled.cost_analysis() or {}
    counted = costs.get("flops", 0.0)
    rounds = max(1.0, flops / counted) if counted > 0 else 1.0
    return max(0.0, costs.get("bytes accessed", 0.0)) * rounds
