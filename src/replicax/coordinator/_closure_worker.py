"""The object that runs on a worker: programs of closures, and iterators with their elements."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from replicax import _context, _nest
from replicax._context import Frame
from replicax._typing import Nest
from replicax.coordinator._calls import Call, OtherElements, Table, UpdateBy, WorkerProgram
from replicax.errors import InputFailed, InvalidType
from replicax.execution import Stage, kind_of
from replicax.input import DistributedDataset, DistributedIterator, distribute
from replicax.parameter_server import Change, Servers, UpdateOf
from replicax.topology import Topology, best_devices
from replicax.variables import changes_by_server, joined, read_rows, require_rows


@final
class ClosureWorker:
    """A worker.

    Args:
      index: Its index.
      servers: The servers of the variables.
      settings: JAX settings of the coordinator, under which the programs were traced.
    """

    def __init__(self, index: int, servers: Servers, settings: Mapping[str, Any]) -> None:
        self._servers = servers
        for name, value in settings.items():
            jax.config.update(name, value)
        self._topology = Topology.of(best_devices()[:1])
        self._frame = Frame(closure=cast(Any, _OnWorker(index)))  # it has no closure to trace
        self._index = np.int32(index)
        self._programs: dict[int, _Loaded] = {}
        self._iterators: dict[int, DistributedIterator] = {}

    def platform(self) -> str:
        """Return for which platform programs must be."""
        return self._topology.local_devices[0].platform

    def examples(self, number: int, dataset: Any, count: int) -> list[Nest]:
        """Return nests with the shapes and dtypes of the next elements of an iterator."""
        self._begin({number: dataset})
        return _examples(self._iterators[number]._peek(count))

    def run(self, call: Call) -> list[np.ndarray] | OtherElements:
        """Run a closure, and have the servers apply its writes."""
        for number in call.forgotten:
            self._iterators.pop(number, None)
        for number, program in call.programs.items():
            self._programs[number] = _Loaded(program)
        self._begin(call.datasets)
        loaded = self._programs[call.program]
        elements = self._take(call, loaded.program)
        if isinstance(elements, OtherElements):
            return elements
        results = self._computed(call, loaded, elements)
        count = loaded.program.count
        self._change(call, loaded.program, results[count:])
        return results[:count]

    def _take(self, call: Call, program: WorkerProgram) -> list[Nest] | OtherElements:
        """Take the elements of a closure, if they are what its program is for."""
        places = [origin[0] for origin in program.taken if isinstance(origin, tuple)]
        iterators = [self._iterators[number] for number in call.iterators]
        counts = collections.Counter(places)
        ahead = {place: iterators[place]._peek(count) for place, count in counts.items()}
        for place, count in counts.items():
            for _ in range(count if len(ahead[place]) < count else 0):
                next(iterators[place])  # raises StopIteration, or the error of the dataset
        remaining = {place: iter(elements) for place, elements in ahead.items()}
        elements = [next(remaining[place]) for place in places]
        if [kind_of(element) for element in elements] != program.element_kinds:
            return OtherElements({place: _examples(ahead[place]) for place in ahead})
        for place in places:
            next(iterators[place])
        return elements

    def _computed(self, call: Call, loaded: _Loaded, elements: Sequence[Nest]) -> list[np.ndarray]:
        """Return the results of a closure, and the operands of its changes."""
        program = loaded.program
        inputs: dict[int, Any] = self._read(program)
        first = program.num_variables
        inputs.update({first + index: array for index, array in call.arrays.items()})
        inputs[first + program.num_arrays] = self._index
        first += program.num_arrays + 1
        waiting: dict[int, Table] = {}
        remaining = iter(elements)
        for origin in program.taken:
            if isinstance(origin, tuple):
                leaves, _ = _nest.flatten(next(remaining))
                inputs.update({first + index: leaf for index, leaf in enumerate(leaves)})
                first += origin[1]
            else:
                waiting[first] = origin
                first += 1
        if loaded.rows is not None:
            for (place, table), rows in zip(waiting.items(), loaded.rows(inputs), strict=True):
                inputs[place] = self._looked_up(table, rows)
        return loaded.main(inputs)

    def _read(self, program: WorkerProgram) -> dict[int, np.ndarray]:
        places = {part.place for parts in program.reads.values() for part in parts}
        values = self._servers.read(sorted(places))
        return {
            index: joined([values[part.place] for part in parts])
            for index, parts in program.reads.items()
        }

    def _looked_up(self, table: Table, rows: np.ndarray) -> np.ndarray:
        require_rows(rows, table.num_rows, table.name)
        found = read_rows(self._servers, table.pieces, rows.reshape(-1))
        return found.reshape(*rows.shape, *found.shape[1:])

    def _change(self, call: Call, program: WorkerProgram, operands: Sequence[np.ndarray]) -> None:
        changes: dict[int, list[Change]] = {}
        remaining = iter(operands)
        for change in program.changes:
            if isinstance(change, UpdateBy):
                given = [next(remaining) for _ in range(change.num_operands)]
                update = UpdateOf(change.program, change.arrays, given, change.changed)
                changes.setdefault(change.server, []).append(update)
                continue
            rows = next(remaining) if change.to_rows else None
            if rows is not None:
                require_rows(rows, change.variable.num_rows, change.variable.name)
            pieces = change.variable.pieces
            writes = changes_by_server(pieces, change.write, next(remaining), rows)
            for server, each in writes.items():
                changes.setdefault(server, []).extend(each)
        if changes:
            self._servers.apply(changes, call.number, call.settled)

    def _begin(self, datasets: Mapping[int, Any]) -> None:
        for number, dataset in datasets.items():
            if number in self._iterators:
                continue
            if callable(dataset):
                with _context.entered(self._frame):
                    try:
                        dataset = dataset()
                    except StopIteration as error:
                        raise InputFailed(
                            "The function that makes the dataset of a worker raised StopIteration."
                        ) from error
            if isinstance(dataset, (DistributedDataset, DistributedIterator)):
                raise InvalidType(
                    "The function that makes the dataset of a worker returned a distributed one. "
                    "Return the dataset itself: each worker has its own."
                )
            self._iterators[number] = iter(distribute(dataset, self._topology, None))


@final
class _Loaded:
    """The programs of a closure, which are compiled when they are first called."""

    def __init__(self, program: WorkerProgram) -> None:
        self.program = program
        self.main = _called(program.main)
        self.rows = None if program.rows is None else _called(program.rows)


def _called(stage: Stage) -> Callable[[Mapping[int, Any]], list[np.ndarray]]:
    """Return a program as a function of the inputs of the closure."""
    function = jax.jit(jax_export.deserialize(bytearray(stage.exported)).call)

    def call(inputs: Mapping[int, Any]) -> list[np.ndarray]:
        return [np.asarray(x) for x in function(*(inputs[index] for index in stage.inputs))]

    return call


@final
class _OnWorker:
    """The value of `Frame.closure` in the function that makes a worker's dataset."""

    def __init__(self, index: int) -> None:
        self._index = index

    def worker_index(self) -> int:
        return self._index


def _examples(elements: Sequence[Nest]) -> list[Nest]:
    """Return elements without their numbers."""
    return [_nest.transform(_example, element) for element in elements]


def _example(leaf: Any) -> Any:
    array = jnp.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
