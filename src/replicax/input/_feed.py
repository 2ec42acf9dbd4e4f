"""The path from sources to steps: each local replica's arrays, still in host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, final

import numpy as np

from replicax._typing import Json
from replicax.errors import InvalidArgument, StructureMismatch
from replicax.input._ending import EndOfData
from replicax.input._memory import own_copy
from replicax.input._row_splitting import Bounds, Workers, common_rows, count_rows, shares
from replicax.input._source import Reader, Source, arrays_of, fields_of
from replicax.values import Shape

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef


@dataclass(slots=True)
class Step:
    """The arrays of one step.

    For each leaf of the element there is either one array with the rows of all local replicas, if
    each has the same number (`wholes`), or one array per replica (`parts`). `state` is the position
    of the pass after the step. `owned` says that the memory belongs to the step; otherwise the
    source may reuse it for the next step. `shapes` has, for each leaf, the shapes of its arrays on
    the replicas of all workers, if there are several workers; `full_share` is the number of rows of
    replica 0 in a full step, if known. `read` says that the step comes from the source, and was not
    made for a worker that has nothing left.
    """

    structure: PyTreeDef
    replicas: int
    wholes: list[np.ndarray] | None
    parts: list[list[np.ndarray]]
    state: dict[str, Json]
    owned: bool = False
    shapes: list[tuple[Shape, ...]] | None = None
    full_share: int | None = None
    read: bool = True

    def arrays(self) -> list[np.ndarray]:
        """Return all arrays, whether whole or in parts."""
        return self.wholes or [array for column in self.parts for array in column]

    def columns(self) -> list[list[np.ndarray]]:
        """Return, for each leaf, one array per replica."""
        if self.wholes is None:
            return self.parts
        return [np.split(whole, self.replicas) for whole in self.wholes]


class Feed(ABC):
    """One pass over the input of this worker, step by step."""

    @abstractmethod
    def step(self) -> Step:
        """Return the next step; raise EndOfData at the end."""

    @property
    @abstractmethod
    def state(self) -> dict[str, Json]:
        """The position of the pass."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the pass."""


@final
class SplittingFeed(Feed):
    """A feed that divides global batches over the replicas.

    A single replica gets elements unchanged, even those that have no rows to divide.

    Args:
      source: A source of global batches.
      workers: The workers that share them.
      own: Whether this worker reads the source alone.
      state: The position of another pass, to resume from.
    """

    def __init__(self, source: Source, workers: Workers, own: bool, state: Json = None) -> None:
        reader_state, self._full, rows_done, steps_done = (
            (None, 0, 0, 0)
            if state is None
            else fields_of(state, "source", "full_rows", "rows_of_batch", "steps_of_batch")
        )
        self._workers = workers
        self._cut = workers.cut_own if own else workers.cut_shared
        self._reader = source.start(reader_state)
        self._before_batch = self._after_batch = self._reader.get_state()
        self._leaves: list[np.ndarray] = []
        self._cuts: deque[list[Bounds] | None] = deque()
        self._rows_of_batch = self._steps_of_batch = 0
        self._check = _SameKind()
        if steps_done:  # Not `rows_done`: with fewer rows than replicas a share may be empty.
            try:
                self._begin_batch(rows_done, steps_done)
            except EndOfData:
                raise InvalidArgument(
                    "The dataset has ended before the batch in which this state stands, after "
                    f"{steps_done} step(s) of it. Give the state of an iterator over the same data."
                ) from None

    def step(self) -> Step:
        if not self._cuts:
            self._before_batch = self._after_batch
            self._begin_batch()
        bounds = self._cuts.popleft()
        self._steps_of_batch += 1
        if bounds is None:
            parts = [[leaf] for leaf in self._leaves]
            return Step(self._check.structure, 1, None, parts, self.state)
        self._rows_of_batch = bounds[-1][1]
        wholes, parts = None, []
        if _evenly_in_a_row(bounds):
            first, last = bounds[0][0], bounds[-1][1]
            wholes = [leaf[first:last] for leaf in self._leaves]
        else:
            parts = [[leaf[start:stop] for start, stop in bounds] for leaf in self._leaves]
        step = Step(self._check.structure, len(bounds), wholes, parts, self.state)
        step.full_share = shares(self._full, self._workers.replicas)[0]
        return step

    def _begin_batch(self, rows_done: int = 0, steps_done: int = 0) -> None:
        leaves, structure = arrays_of(self._reader.read())
        rows = common_rows(leaves)
        if rows is None and self._workers.replicas > 1:
            rows = count_rows(leaves, structure)
        self._check(structure, leaves)
        self._after_batch = self._reader.get_state()
        self._leaves = leaves
        self._steps_of_batch = steps_done
        if rows is None:
            self._cuts.append(None)
        else:
            self._full = max(self._full, rows)
            self._cuts.extend(self._cut(rows, self._full, rows_done, steps_done))

    @property
    def state(self) -> dict[str, Json]:
        """The position; within a batch, the position before it and how much of it is done."""
        inside = bool(self._cuts)
        return {
            "source": self._before_batch if inside else self._after_batch,
            "full_rows": self._full,
            "rows_of_batch": self._rows_of_batch if inside else 0,
            "steps_of_batch": self._steps_of_batch if inside else 0,
        }

    def close(self) -> None:
        self._reader.close()


@final
class TakingFeed(Feed):
    """A feed that gives each replica an element, from a common source or from its own."""

    def __init__(self, sources: Sequence[Source], replicas: int, state: Json = None) -> None:
        states = [None] * len(sources)
        if state is not None:
            states = list(fields_of(state, "sources")[0])
        if len(states) != len(sources):
            raise InvalidArgument(
                f"The state is one of {len(states)} pipeline(s); this dataset has {len(sources)}. "
                "Continue with the same number of workers (with PER_REPLICA: of replicas)."
            )
        self._readers: list[Reader | None] = [
            source.start(state) for source, state in zip(sources, states, strict=True)
        ]
        self._last_states = states
        self._replicas = replicas
        self._check = _SameKind()

    def step(self) -> Step:
        each = self._replicas // len(self._readers)
        elements = [self._take(index // each) for index in range(self._replicas)]
        example = next((element for element in elements if element is not None), None)
        if example is None:
            raise EndOfData
        parts = [
            [_rows_or_none(element, leaf, example) for element in elements]
            for leaf in range(len(example))
        ]
        return Step(self._check.structure, self._replicas, None, parts, self.state, owned=True)

    def _take(self, index: int) -> list[np.ndarray] | None:
        reader = self._readers[index]
        if reader is None:
            return None
        try:
            element = reader.read()
        except EndOfData:  # not asked again after its end: some sources would start over
            self._last_states[index] = reader.get_state()
            reader.close()
            self._readers[index] = None
            return None
        leaves, structure = arrays_of(element)
        self._check(structure, leaves)
        # Copied now: the source may reuse its memory for the next element of the same step.
        return [own_copy(leaf) for leaf in leaves]

    @property
    def state(self) -> dict[str, Json]:
        states = [
            last if reader is None else reader.get_state()
            for reader, last in zip(self._readers, self._last_states, strict=True)
        ]
        return {"sources": states}

    def close(self) -> None:
        for reader in self._readers:
            if reader is not None:
                reader.close()


def first_step(feed: Feed) -> Step | None:
    """Return the first step of a pass, or None if it has none, and close the pass."""
    try:
        return feed.step()
    except EndOfData:
        return None
    finally:
        feed.close()


def _evenly_in_a_row(bounds: Sequence[Bounds]) -> bool:
    return len({stop - start for start, stop in bounds}) == 1 and all(
        stop == start for (_, stop), (start, _) in pairwise(bounds)
    )


def _rows_or_none(
    element: list[np.ndarray] | None, leaf: int, example: list[np.ndarray]
) -> np.ndarray:
    """Return a replica's array, which has no rows if the replica got no element."""
    if element is not None:
        return element[leaf]
    if not example[leaf].ndim:
        raise InvalidArgument(
            "The dataset ended in the middle of a step, and its elements are single numbers, of "
            "which a replica cannot get none. Batch them, or make their number a multiple of the "
            "replicas."
        )
    return example[leaf][:0]


class _SameKind:
    """A check that all elements are of the same kind as the first."""

    structure: PyTreeDef | None = None
    _ranks: list[int]

    def __call__(self, structure: PyTreeDef, leaves: Sequence[np.ndarray]) -> None:
        ranks = [leaf.ndim for leaf in leaves]
        if self.structure is None:
            self.structure, self._ranks = structure, ranks
        elif structure != self.structure or ranks != self._ranks:
            raise StructureMismatch(
                f"The elements of a dataset must be of one kind. The first was {self.structure} "
                f"with arrays of {self._ranks} dimensions; this one is {structure} with "
                f"{ranks}."
            )
