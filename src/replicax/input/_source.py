"""The interface through which replicax reads datasets of any library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, final

import jax
import numpy as np

from replicax import _nest
from replicax._enums import AutoShardPolicy
from replicax._typing import Json, Nest
from replicax.errors import InvalidArgument, InvalidType, StructureMismatch
from replicax.input._ending import EndOfData, Guarded

if TYPE_CHECKING:
    from jax.tree_util import PyTreeDef


class CannotShardByFile(Exception):
    """The reason a source cannot be shared by files, phrased as the end of a sentence."""


def fields_of(state: object, *names: str) -> tuple[Json, ...]:
    """Return the named fields of a state; refuse a state that does not have exactly these."""
    if isinstance(state, Mapping) and set(state) == set(names):
        return tuple(state[name] for name in names)
    raise InvalidArgument(
        f"This is not a state of this kind of iterator: {state!r}. A part of it should have had "
        f"{' and '.join(names)}. Give what `get_state` of an iterator over the same kind of "
        "dataset returned."
    )


class Reader(ABC):
    """One pass over a source. It is used by one thread at a time."""

    @abstractmethod
    def read(self) -> Nest:
        """Return the next element, a nest of NumPy arrays; raise EndOfData at the end."""

    @abstractmethod
    def get_state(self) -> Json:
        """Return the position, as JSON can express it; `Source.start(state)` resumes there."""

    def close(self) -> None:
        """Release the resources of the pass."""
        return


class Source(ABC):
    """A dataset of some library. To add one, write a file in `sources/` and list it there."""

    @abstractmethod
    def start(self, state: object = None) -> Reader:
        """Start a pass from the beginning, or from the position of another one."""

    @property
    def length(self) -> int | None:
        """The number of elements of a pass; None when it is not known."""
        return None

    @property
    def infinite(self) -> bool:
        """True if a pass is known never to end."""
        return False

    @property
    def quick(self) -> bool:
        """True if elements are available without waiting."""
        return False

    @property
    def continues(self) -> bool:
        """True if it cannot start over: a pass continues where the previous one ended."""
        return False

    @property
    def own_policy(self) -> AutoShardPolicy:
        """The policy that the dataset itself sets for sharing it among workers."""
        return AutoShardPolicy.AUTO

    def shard_by_file(self, count: int, index: int) -> Source:
        """Return the source for worker `index` of `count`, if each reads its own files."""
        raise CannotShardByFile("it is not read from files")

    def batched(self, size: int) -> Source:
        """Return a source of its elements in batches of `size`."""
        return _Batched(self, size)


@final
class CountingReader(Reader):
    """A pass over something that can only be read from the beginning.

    Its state is how far it got. Resuming there reads up to that point again, which is exact as long
    as every pass has the same order.

    Args:
      elements: The pass, from its beginning.
      convert: Converts an element to a nest of NumPy arrays.
      origin: The data for starting a pass in the same order; part of the state.
      done: The number of elements to skip.
    """

    def __init__(
        self,
        elements: Iterator[Nest],
        convert: Callable[[Nest], Nest],
        *,
        origin: Json = None,
        done: int = 0,
    ) -> None:
        self._given = elements
        # A generator cannot raise StopIteration: Python turns it into a RuntimeError.
        self._elements = elements if isinstance(elements, Generator) else Guarded(elements)
        self._convert = convert
        self._origin = origin
        self._skip = self._done = done

    def read(self) -> Nest:
        if self._skip:  # only once an element is wanted: it may take long
            next(islice(self._elements, self._skip, self._skip), None)
            self._skip = 0
        try:
            element = next(self._elements)
        except StopIteration:
            raise EndOfData from None
        self._done += 1
        return self._convert(element)

    def get_state(self) -> Json:
        return {"read": self._done, "origin": self._origin}

    def close(self) -> None:
        if isinstance(self._given, Generator):
            self._given.close()  # so that the user's `finally` runs here and now


@final
class _Batched(Source):
    def __init__(self, examples: Source, size: int) -> None:
        self._examples = examples
        self._size = size

    @property
    def length(self) -> int | None:
        examples = self._examples.length
        return None if examples is None else -(-examples // self._size)

    @property
    def infinite(self) -> bool:
        return self._examples.infinite

    @property
    def own_policy(self) -> AutoShardPolicy:
        return self._examples.own_policy

    def shard_by_file(self, count: int, index: int) -> Source:
        return _Batched(self._examples.shard_by_file(count, index), self._size)

    def start(self, state: object = None) -> Reader:
        return _BatchingReader(self._examples.start(state), self._size)


@final
class _BatchingReader(Reader):
    def __init__(self, examples: Reader, size: int) -> None:
        self._examples = examples
        self._size = size

    def read(self) -> Nest:
        rows = [self._examples.read()]
        for _ in range(self._size - 1):
            try:
                rows.append(self._examples.read())
            except EndOfData:
                break
        try:
            return _nest.transform(lambda *columns: np.stack(columns), *rows, everything=True)
        except ValueError as error:
            raise StructureMismatch(
                "The examples of a batch must be of one kind and shape; got "
                f"{', '.join(sorted({_kind(row) for row in rows}))}. Make them equal, or batch "
                "them yourself."
            ) from error

    def get_state(self) -> Json:
        return self._examples.get_state()

    def close(self) -> None:
        self._examples.close()


def _kind(example: Nest) -> str:
    return str(_nest.transform(np.shape, example, everything=True))


def arrays_of(element: Nest) -> tuple[list[np.ndarray], PyTreeDef]:
    """Return the arrays of an element and its structure; refuse values that are not arrays."""
    leaves, structure = _nest.flatten(element, everything=True)
    arrays = [np.asarray(leaf) for leaf in leaves]
    for index, (leaf, array) in enumerate(zip(leaves, arrays, strict=True)):
        if array.dtype == object and not isinstance(leaf, np.ndarray):
            path = _nest.flatten_with_paths(element, everything=True)[0][index][0]
            raise InvalidType(
                f"An element of a dataset has a {type(leaf).__module__}.{type(leaf).__qualname__} "
                f"at {path or 'its top'}, which is neither an array, a number nor a string. Leave "
                "it out or make arrays of it; a class that holds arrays can be registered with "
                "`jax.tree_util.register_pytree_node`."
            )
    return arrays, structure


def numpy_of(element: Nest) -> Nest:
    """Return an element as a nest of NumPy arrays."""
    leaves, structure = arrays_of(element)
    return jax.tree.unflatten(structure, leaves)
