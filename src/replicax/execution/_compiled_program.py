"""Pure programs for functions that read and write variables, called with the variables' states."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from replicax import _bridges, _context, _nest, cluster
from replicax._context import Frame
from replicax._jax_compat import calls_python, constants_in
from replicax._typing import Nest
from replicax.collectives import dispatch, is_awaited
from replicax.errors import InvalidType
from replicax.execution._cache_key import is_paddable
from replicax.execution._divergence import refuse_divergence
from replicax.execution._iterator_elements import NotOneProgram, TakenElements
from replicax.execution._shard_map_operands import is_among
from replicax.execution._tracing import trace_program
from replicax.input import DistributedIterator
from replicax.topology import Topology
from replicax.values import Mirrored, PerReplica, as_plain
from replicax.variables import require_equal_copies, reusing_states, state_of, storage_of

# Only one thread at a time may take states, pass them to a program that may reuse their memory, and
# replace them.
_lock = threading.RLock()


@final
class CompiledProgram:
    """A compiled program for one signature of a function: states in, states out.

    Args:
      function: A function of the arrays in the arguments; the other arguments are bound.
      frame: The context in which the function was called.
      arrays: The arrays of the first call; only their shapes and dtypes matter.
      plain: The indices of those that the user passed as `jax.Array`s, on any devices.
      taken: Records the elements of iterators that the function takes. Their arrays come after
        the others when the program is called.
      given: The Python numbers in the arguments.
      name: The name of the function.
    """

    def __init__(
        self,
        function: Callable[[list[Any]], Nest],
        frame: Frame,
        arrays: Sequence[jax.Array],
        plain: Sequence[int],
        taken: TakenElements,
        given: Sequence[Any],
        name: str,
    ) -> None:
        self._label = f"the compiled function `{name}`"
        self._agreed = False
        outputs = ProgramResults(given)
        traced = trace_program(lambda arrays: outputs.take(function(arrays)), frame, arrays, taken)
        jaxpr, captures = traced.jaxpr, traced.captures
        self.written, self.read, self.topology = traced.written, traced.read, traced.topology
        self.uneven = captures.uneven
        of_elements = sum(len(element.arrays or ()) for element in taken.elements)
        self._plain = [*plain, *range(len(arrays), len(arrays) + of_elements)]
        self._storages = [storage_of(variable) for variable in (*self.written, *self.read)]
        self._changed = self._storages[: len(self.written)]
        self._reused = [i for i, storage in enumerate(self._changed) if storage.reusable]
        _bridges.examine(constants_in(jaxpr), [*self.written, *self.read])
        captures.watched.examine(jaxpr)
        if self.topology is not None and self.topology.num_replicas > 1:
            refuse_divergence(jaxpr)
        # A program that calls back into Python, or that other workers take part in, can fail while
        # it runs, and then the variables' old values are still needed.
        self._calls_python = calls_python(jaxpr)
        awaited = self.topology is not None and is_awaited(self.topology)
        self._donates = not (self._calls_python or awaited)
        shardings: Any = None
        if self.topology is not None:
            whole, split = self.topology.replicated, self.topology.split
            shardings = [storage.sharding(self.topology) for storage in self._changed]
            if self.topology.logical_devices_per_replica > 1:
                # A replica's result keeps its layout over the replica's devices.
                split = None
                whole = None if self.topology.num_replicas == 1 else whole
            shardings += [split if is_split else whole for is_split in outputs.split]
        # Parameters come in first as plain arrays, and then as results of this program. They are
        # put on all devices from the start, or XLA would compile again for the second call.
        self._carried = {
            index for index in plain if (arrays[index].shape, arrays[index].dtype) in outputs.common
        }
        self.jitted = jax.jit(
            jaxpr_as_fun(jaxpr),
            donate_argnums=tuple(self._reused) if self._donates else (),
            **({"out_shardings": shardings} if shardings is not None else {}),
        )
        self._outputs = outputs

    def __call__(self, arrays: Sequence[object]) -> Nest:
        topology = self.topology
        transaction = _context.current().transaction
        with _lock, reusing_states if self._donates else nullcontext():
            if transaction is not None:  # The replicas of an eager `run` have met to call this.
                for variable in self.written:
                    transaction.remember(variable, state_of(variable))
            states = self._states()
            arguments = [*states, *self._on_mesh(arrays)]
            if not self._agreed:
                self._agree(arguments)
            if topology is None:
                results = self.jitted(*arguments)
            else:
                results = dispatch(topology, self._label, self.jitted, *arguments)
            if not self._donates:
                jax.block_until_ready(results)  # if this fails, nothing has changed yet
            for storage, array in zip(self._changed, results, strict=False):
                storage.store_result(array, topology, self._donates)
        require_equal_copies(self.written, self._label)
        return self._outputs.rebuild(results[len(self.written) :], topology)

    def trace(self, arrays: Sequence[object]) -> jax.stages.Traced:
        """Return the program for these arrays, or shapes, as JAX traces it, without running it."""
        return self.jitted.trace(*self._lifted(), *self._on_mesh(arrays))

    def _agree(self, arguments: Sequence[Nest]) -> None:
        """Make sure, before the first run, that all workers are about to run the same program."""
        if self.topology is not None and self.topology.spans_processes:
            facts = {
                "arguments": "\n".join(f"{a.dtype}{list(a.shape)}" for a in arguments),
                "variables": "\n".join(variable.name for variable in (*self.written, *self.read)),
            }

            # A program that calls Python contains addresses that are valid in this process only.
            text = "" if self._calls_python else self.jitted.lower(*arguments).as_text()
            cluster.current().agree_on_program(self._label, facts, text)
        self._agreed = True

    def _lifted(self) -> list[Any]:
        return [storage.lift(self.topology) for storage in self._storages]

    def _states(self) -> list[object]:
        states = self._lifted()
        # A state that other code may hold is copied before the program reuses its memory.
        escaped = [i for i in self._reused if not self._changed[i].exclusive]
        if escaped and self._donates:
            copies = _copies([states[i] for i in escaped])
            for i, copy in zip(escaped, copies, strict=True):
                states[i] = copy
        return states

    def _on_mesh(self, arrays: Sequence[object]) -> Sequence[object]:
        """Move plain arrays that are committed to other devices to the program's devices."""
        topology = self.topology
        if topology is not None and topology.spans_processes:
            return [_spanning(array, topology) for array in arrays]
        if topology is None or not self._plain:
            return arrays
        devices = topology.replicated.device_set
        moved = list(arrays)
        for index in self._plain:
            array = moved[index]
            if (
                isinstance(array, jax.Array)
                and (array.committed or index in self._carried)
                and (array.sharding.device_set != devices or _is_otherwise(array, topology))
            ):
                moved[index] = topology.replicate(array)
        return moved


def _is_otherwise(array: jax.Array, topology: Topology) -> bool:
    """Tell whether an array has the topology's devices in another order, which JAX would refuse."""
    mesh = getattr(array.sharding, "mesh", topology.mesh)
    return mesh is not topology.mesh and list(mesh.devices.flat) != list(topology.mesh.devices.flat)


def _spanning(array: object, topology: Topology) -> object:
    """Return this process's part of an array for a program that spans all workers."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return array
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return array
    return topology.replicate(array)


def _copies(arrays: list[jax.Array]) -> list[jax.Array]:
    """Copy arrays without compiling a program, which would take 0.4 s for 600 arrays."""
    return jax.device_put(arrays, [array.sharding for array in arrays], may_alias=False)


class ProgramResults:
    """The results of a function: arrays of its program, and all other objects.

    Args:
      given: Python numbers in the arguments, which are returned unchanged.
    """

    split: list[bool]
    common: set[tuple[Any, Any]]  # shapes and dtypes of results that all replicas share

    def __init__(self, given: Sequence[Any]) -> None:
        self._given = given

    def take(self, nest: Nest) -> list[jax.Array]:
        leaves, self._structure = _nest.flatten(nest, keep_opaque=True)
        arrays: list[jax.Array] = []
        self.split, self.common = [], set()
        self._wrap: list[Callable[[Any, Topology | None], Any] | None] = []
        self._plain: list[Any] = []
        for leaf in leaves:
            wrap, array = self._describe(leaf)
            self._wrap.append(wrap)
            self._plain.append(None if wrap is not None else leaf)
            if wrap is not None:
                arrays.append(array)
                once = isinstance(leaf, PerReplica) and leaf.common is not None
                self.split.append(isinstance(leaf, PerReplica) and not once)
                if once:
                    self.common.add((array.shape, array.dtype))
        return arrays

    def _describe(self, leaf: object) -> tuple[Any, Any]:
        topology = leaf.topology if isinstance(leaf, (PerReplica, Mirrored)) else None
        if isinstance(leaf, PerReplica) and topology is not None:
            if not leaf.uniform:
                return self._uneven(leaf, topology)
            if leaf.common is not None:
                return lambda a, _: PerReplica.of_common(a, topology), leaf.common
            array = leaf.array(topology)
            scalars = leaf.scalars
            return lambda a, _: PerReplica.from_array(a, topology, scalars=scalars), array
        if isinstance(leaf, Mirrored) and topology is not None:
            return lambda a, _: Mirrored.from_array(a, topology), leaf.array(topology)
        if is_among(leaf, self._given):
            return None, None
        if isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            return _first_copy, jnp.asarray(leaf)
        if isinstance(leaf, DistributedIterator):
            raise InvalidType(
                "A compiled function returned a distributed iterator, which another call would get "
                "as well. Return its elements, or nothing: the caller has the iterator."
            )
        return None, None

    def _uneven(self, leaf: PerReplica, topology: Topology) -> tuple[Any, Any]:
        shapes = leaf.shapes
        if not (leaf.traced and is_paddable(shapes, [part.dtype for part in leaf.samples()])):
            raise NotOneProgram
        return lambda a, _: PerReplica.from_padded(a, topology, shapes), leaf.padded(topology)

    def rebuild(self, arrays: Sequence[jax.Array], topology: Topology | None) -> Nest:
        remaining = iter(arrays)
        leaves = [
            plain if wrap is None else wrap(next(remaining), topology)
            for wrap, plain in zip(self._wrap, self._plain, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)


def _first_copy(array: jax.Array, topology: Topology | None) -> jax.Array:
    """Return a plain result on the first replica's devices, as in eager execution."""
    if topology is None:
        return array
    if topology.logical_devices_per_replica > 1 and not isinstance(array, Tracer):
        return as_plain(Mirrored.from_array(array, topology).primary, topology)
    return as_plain(array, topology)
