"""What runs on a worker: programs of closures, and the iterators from which they take elements."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export

from replicax import _context, _nest
from replicax._context import Frame
from replicax._typing import Nest
from replicax.coordinator._calls import Call, OtherElements, WorkerProgram
from replicax.errors import InputFailed, InvalidType
from replicax.execution import kind_of
from replicax.input import DistributedDataset, DistributedIterator, distribute
from replicax.parameter_server import Servers, WriteTo
from replicax.topology import Topology, best_devices


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
        self._frame = Frame(closure=_OnWorker(index))
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
        program = loaded.program
        iterators = [self._iterators[number] for number in call.iterators]
        counts = collections.Counter(program.taken)
        ahead = {place: iterators[place]._peek(count) for place, count in counts.items()}
        for place, count in counts.items():
            for _ in range(count if len(ahead[place]) < count else 0):
                next(iterators[place])  # raises StopIteration, or the error of the dataset
        remaining = {place: iter(elements) for place, elements in ahead.items()}
        elements = [next(remaining[place]) for place in program.taken]
        if [kind_of(element) for element in elements] != program.element_kinds:
            return OtherElements({place: _examples(ahead[place]) for place in ahead})
        for place in program.taken:
            next(iterators[place])
        leaves = [leaf for element in elements for leaf in _nest.flatten(element)[0]]
        states = self._read(program)
        index = [self._index] if program.takes_index else []
        results = loaded.call(
            *states, *call.arrays, *index, *(leaves[index] for index in program.elements)
        )
        arrays = [np.asarray(result) for result in results]
        self._write(call, program, arrays[program.count :])
        return arrays[: program.count]

    def _read(self, program: WorkerProgram) -> list[np.ndarray]:
        places = {(each.server, each.number) for parts in program.reads for each in parts}
        values = self._servers.read(sorted(places))
        return [_joined([values[each.server, each.number] for each in p]) for p in program.reads]

    def _write(self, call: Call, program: WorkerProgram, operands: Sequence[np.ndarray]) -> None:
        changes: dict[int, list[WriteTo]] = {}
        for (parts, how), operand in zip(program.writes, operands, strict=True):
            for part in parts:
                changes.setdefault(part.server, []).append(part.write(how, operand))
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
    """A program that is compiled when it is first called."""

    def __init__(self, program: WorkerProgram) -> None:
        self.program = program
        self.call = jax.jit(jax_export.deserialize(bytearray(program.exported)).call)


@final
class _OnWorker:
    """The value of `Frame.closure` in the function that makes a worker's dataset."""

    def __init__(self, index: int) -> None:
        self._index = index

    def worker_index(self) -> int:
        return self._index

    def note_write(self, *_: object) -> None:
        raise AssertionError("datasets do not write variables")

    def peek(self, place: int, count: int) -> list[Nest]:
        raise AssertionError("datasets are made outside of closures")


def _examples(elements: Sequence[Nest]) -> list[Nest]:
    """Return elements without their numbers."""
    return [_nest.transform(_example, element) for element in elements]


def _example(leaf: Any) -> Any:
    array = jnp.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


