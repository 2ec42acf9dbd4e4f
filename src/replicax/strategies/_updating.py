"""Updates of the copies of variables, one by one, on their devices: `extended.update`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from replicax import _context, _nest
from replicax._context import ContextKind, Frame
from replicax._typing import Leaf, Nest
from replicax.collectives import regroup
from replicax.errors import InvalidArgument
from replicax.topology import DeviceOrSharding, Topology
from replicax.values import Mirrored, PerReplica, place
from replicax.variables import (
    Overlay,
    Variable,
    VariablePlacement,
    all_or_nothing,
    require_equal_copies,
    set_state,
    state_of,
    storage_of,
)

if TYPE_CHECKING:
    from replicax.strategies._strategy import Strategy

Arguments = tuple[Sequence[Nest], Mapping[str, Nest]]


@final
@dataclass(frozen=True, slots=True)
class Update:
    """One call of a function for each copy of a variable, or on each of the given devices.

    Args:
      strategy: The strategy that the copies belong to.
      method: The name of the method, for messages.
      devices: The local devices of the copies.
      fn: The function.
      group: Whether to merge what the calls return; otherwise each leaf is a list.
    """

    strategy: Strategy
    method: str
    devices: tuple[jax.Device, ...]
    fn: Callable[..., object]
    group: bool

    def run(self, frame: Frame, arguments: Arguments) -> Nest:
        """Call the function; if it fails, no copy is changed."""
        per_replica = any(isinstance(leaf, PerReplica) for leaf in _nest.leaves(arguments))
        if per_replica:
            self._require_fitting()
        # Several replicas may share one copy, which then belongs to the first of them.
        a_copy_each = len(self.devices) == len(self._topology.local_replicas)
        differ = per_replica and a_copy_each and self._topology.num_replicas > 1
        if frame.program is not None:
            frame.program.note(self._topology)
        else:
            return self._grouped(self._for_each_copy(frame, arguments, self.devices), differ)
        if not frame.program.inside:
            if differ:
                return self._in_replicas(frame, arguments)
            return self._grouped(self._for_each_copy(frame, arguments, self.devices), False)
        # Here every replica runs this code, so each changes only the copy that is its own.
        if per_replica and not differ:
            arguments = _nest.transform(self._first_component, arguments)
        (result,) = self._for_each_copy(frame, arguments, self.devices[:1])
        if self.group:
            return regroup([result], self._topology, wrap=Mirrored)
        if differ:
            return _nest.transform(lambda leaf: _as_list(self._own(leaf)), result)
        return _nest.transform(lambda leaf: [leaf] * len(self.devices), result)

    @property
    def _topology(self) -> Topology:
        return self.strategy.topology

    def _require_fitting(self) -> None:
        replicas = len(self._topology.local_replicas)
        if len(self.devices) not in (1, replicas):
            raise InvalidArgument(
                f"`{self.method}` got a PerReplica argument with {replicas} components, for "
                f"{len(self.devices)} copies. Combine it first: "
                "`strategy.extended.reduce_to(...)`."
            )

    def _for_each_copy(
        self, frame: Frame, arguments: Arguments, devices: Sequence[jax.Device]
    ) -> list[Nest]:
        results: list[Nest] = []
        with all_or_nothing(frame) as frame:
            for index, device in enumerate(devices):
                here = replace(frame, kind=ContextKind.UPDATE, copy=index)
                sharding = self._topology.local_sharding_of(device)
                with _context.entered(here), jax.default_device(device):
                    args, kwargs = _nest.transform(
                        lambda leaf, index=index, sharding=sharding: _copy_at(
                            leaf, index, sharding
                        ),
                        arguments,
                    )
                    results.append(self.fn(*args, **kwargs))
            assert frame.transaction is not None
            require_equal_copies(frame.transaction.written, f"`{self.method}`")
            if frame.program is None:
                for variable in frame.transaction.written:
                    set_state(variable, storage_of(variable).settled(state_of(variable)))
        return results

    def _grouped(self, results: list[Nest], differ: bool) -> Nest:
        if not self.group:
            return _nest.transform(lambda *leaves: list(leaves), *results)
        if differ:
            return regroup(results, self._topology)
        same = self.devices == self._topology.local_devices
        topology = self._topology if same else Topology.of(self.devices)
        return regroup(results, topology, wrap=Mirrored)

    def _in_replicas(self, frame: Frame, arguments: Arguments) -> Nest:
        """Run it in the replicas, each with its own copy; outside, all copies are one array."""
        grouped = replace(self, group=True)

        def in_replica(args: Sequence[Nest], kwargs: Mapping[str, Nest]) -> Nest:
            def merged(_: Strategy, args: Nest, kwargs: Nest) -> Nest:
                return grouped.run(_context.current(), (args, kwargs))

            replica = _context.current().replica
            assert replica is not None
            return replica.merge_call(merged, (args, kwargs))

        assert frame.program is not None
        result = frame.program.executor.run(self.strategy, frame, in_replica, arguments, {})
        return result if self.group else _nest.transform(_as_list, result)

    def _first_component(self, leaf: Leaf) -> Leaf:
        """Return the first replica's component of a value, inside a program."""
        if not isinstance(leaf, PerReplica):
            return leaf
        return self.strategy.collectives.broadcast(leaf).component(0)

    def _own(self, leaf: Leaf) -> Leaf:
        """Return a replica's own result, inside a program, as a value of all replicas."""
        if not isinstance(leaf, jax.Array):
            return leaf
        return PerReplica.from_array(leaf, self._topology, inside=True)


def send_update(
    placement: VariablePlacement,
    frame: Frame,
    fn: Callable[..., Nest],
    arguments: Arguments,
    group: bool,
) -> Nest:
    """Have variables updated where they are, by a function of them and of other arguments."""
    leaves = _nest.leaves(arguments)
    variables = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Variable)))
    numbers = {
        index: leaf.primary if isinstance(leaf, Mirrored) else leaf
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, (jax.Array, np.ndarray, Mirrored))
    }
    results: list[Nest] = []

    def update(values: list[jax.Array], operands: list[jax.Array]) -> list[jax.Array]:
        overlay = Overlay({}, frame.overlay)
        for variable, value in zip(variables, values, strict=True):
            overlay.write(variable, value)
        given = dict(zip(numbers, operands, strict=True))
        count = itertools.count()

        def argument(leaf: Leaf) -> Leaf:
            return given.get(next(count), leaf)

        here = replace(frame, kind=ContextKind.UPDATE, copy=0, overlay=overlay)
        with _context.entered(here):
            args, kwargs = _nest.transform(argument, arguments)
            results.append(fn(*args, **kwargs))
        return [_found(overlay, variable) for variable in variables]

    operands = [jnp.asarray(number) for number in numbers.values()]
    of_first = [variables[0] if x.shape == variables[0].shape else None for x in operands]
    placement.send_update(variables, update, operands, of_first)
    result = results[-1]
    return result if group else _nest.transform(lambda leaf: [leaf], result)


def _found(overlay: Overlay, variable: Variable) -> jax.Array:
    value = overlay.find(variable)
    assert value is not None
    return value


def _as_list(leaf: object) -> Leaf:
    return list(leaf.values) if isinstance(leaf, (PerReplica, Variable)) else leaf


def _copy_at(leaf: object, index: int, sharding: DeviceOrSharding) -> Leaf:
    """Return the argument that the function gets for copy `index`."""
    if isinstance(leaf, Variable):
        return leaf.values[index] if len(leaf.values) > index else leaf.values[0]
    if isinstance(leaf, PerReplica):
        return place(leaf.component(index), sharding)
    if isinstance(leaf, Mirrored):
        local = leaf.component(index) if len(leaf.values) > index else leaf.primary
        return place(local, sharding)
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed:
        return place(leaf, sharding)
    return leaf
