"""One pass over a distributed dataset."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NoReturn, Protocol, final

from jax.extend.core import get_opaque_trace_state

from replicax import _context
from replicax._context import ContextKind, Frame
from replicax._typing import Json, Nest
from replicax.errors import (
    ContextError,
    InvalidArgument,
    InvalidType,
    NotInitialized,
    NotPicklable,
    ReplicaxError,
)
from replicax.input._element_supply import ElementSupply
from replicax.input._source import fields_of

_untraced = get_opaque_trace_state()


class Passes(Protocol):
    """The interface that an iterator needs of its dataset."""

    @property
    def element_spec(self) -> Nest: ...

    @property
    def _reads_alike(self) -> bool:
        """True if all workers read the same data and take their own rows from it."""
        ...

    @property
    def continues(self) -> bool:
        """True if a pass continues where the previous one ended."""
        ...

    def _start(self, steps: int, feed_state: object) -> ElementSupply:
        """Start a pass at the point that another one had reached after this many steps."""
        ...


class DistributedIterator:
    """One pass over a `DistributedDataset`, prepared ahead in the background.

    >>> import replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> dataset = strategy.experimental_distribute_dataset(
    ...     rx.from_tensor_slices(list(range(6))).batch(2))
    >>> iterator = iter(dataset)
    >>> first, state = next(iterator), iterator.get_state()
    >>> other = iter(dataset)
    >>> other.set_state(state)
    >>> [strategy.gather(element, axis=0).tolist() for element in other]
    [[2, 3], [4, 5]]
    >>> iterator.close()
    """

    def __init__(self, dataset: Passes) -> None:
        self._dataset = dataset
        self._steps = 0
        self._feed_state: object = None
        self._elements: ElementSupply | None = None
        self._closed = False
        self._taking = threading.Lock()  # so that only one thread gets each element

    def __iter__(self) -> DistributedIterator:
        program = _context.current().program
        if program is not None:
            program.loop()
        return self

    def __next__(self) -> Nest:
        frame = _outside_of_replicas("next")
        if frame.program is not None:
            return frame.program.next_element(self)
        if frame.rehearsal is not None:
            return frame.rehearsal.next_element(self)
        _require_untraced("next")
        with self._taking:
            element, state = self._started().take()
            self._steps, self._feed_state = self._steps + 1, state
        return element

    def get_next(self) -> Nest:
        """Return the next element; the same as `next(iterator)`."""
        return next(self)

    def get_next_as_optional(self) -> Optional:
        """Return an `Optional` with the next element, or an empty one at the end of the pass."""
        program = _outside_of_replicas("get_next_as_optional").program
        if program is not None:
            program.loop()
        try:
            return Optional((next(self),))
        except StopIteration:
            return Optional(())

    def _peek(self, count: int) -> list[Nest]:
        """Return the next `count` elements without taking them; fewer if there are no more."""
        with self._taking:
            return [element for element, _ in self._started().peek(count)]

    @property
    def element_spec(self) -> Nest:
        """Shapes and dtypes of the first replica's part of a full element."""
        return self._dataset.element_spec

    @property
    def _reads_alike(self) -> bool:
        """True if all workers read the same data, so that one's state serves any number of them."""
        return self._dataset._reads_alike

    def get_state(self) -> dict[str, Json]:
        """Return how far the pass has come, for `set_state`, in a form that JSON can express.

        Elements that have been prepared but not taken count as unread.
        """
        return {"steps": self._steps, "feed": self._feed_state}

    def set_state(self, state: Mapping[str, Json]) -> None:
        """Resume at the position of an iterator over the same data, in this or another process.

        Prefetch depth, strategy and number of replicas may differ from that iterator's.
        """
        if _context.current().program is not None:
            raise ContextError(
                "An iterator was set back, or initialized, in an `rx.function`, where that would "
                "happen while it is traced, and not in every call. Do it outside."
            )
        steps, feed = fields_of(state, "steps", "feed")
        if not isinstance(steps, int) or steps < 0:
            raise InvalidArgument(
                f"The number of steps in a state must be a whole number; got {steps!r}. Give "
                "what `get_state` returned."
            )
        elements = self._dataset._start(steps, feed)
        self.close()
        self._elements = elements
        self._steps, self._feed_state, self._closed = steps, feed, False

    def close(self) -> None:
        """End the prefetching thread. It also ends with the pass or the iterator's lifetime."""
        self._closed = True
        elements, self._elements = self._elements, None
        if elements is not None:
            elements.close()

    def _started(self) -> ElementSupply:
        """Start the pass on first use, so that `set_state` right after `iter` reads nothing."""
        if self._closed:
            raise self._refusal()
        elements = self._elements
        if elements is None:
            self._elements = elements = self._dataset._start(self._steps, self._feed_state)
            if self._closed:  # by another thread, which did not see these elements
                elements.close()
        return elements

    def _refusal(self) -> ReplicaxError:
        return InvalidArgument(f"{self!r} has been closed. Make a new one: `iter(dataset)`.")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} after {self._steps} step(s) of {self._dataset!r}>"

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(
            f"{self!r} cannot be pickled. Pickle `iterator.get_state()`, and give it to "
            "`set_state` of a new iterator."
        )


@final
class InitializableIterator(DistributedIterator):
    """The iterator of `rx.compat.v1`, which starts, and restarts, on request.

    >>> import warnings, numpy as np, replicax as rx
    >>> warnings.simplefilter("ignore", DeprecationWarning)
    >>> strategy = rx.compat.v1.OneDeviceStrategy("CPU:0")
    >>> iterator = strategy.make_dataset_iterator([np.int32([1, 2]), np.int32([3, 4])])
    >>> operations = iterator.initialize()
    >>> print(iterator.get_next(), iterator.get_next())
    [1 2] [3 4]
    >>> operations = iterator.initialize()
    >>> print(iterator.get_next())
    [1 2]
    >>> iterator.close()
    """

    def __init__(self, dataset: Passes) -> None:
        super().__init__(dataset)
        self.close()

    def initialize(self) -> list[object]:
        """Go to the beginning of a new pass.

        If the elements come from a function, which cannot start over, nothing changes until it has
        reached its end.

        Returns:
          The operations that a session would run, of which there are none.
        """
        if self._closed or not (self._dataset.continues and self._peek(1)):
            self.set_state({"steps": 0, "feed": None})
        return []

    @property
    def initializer(self) -> list[object]:
        """Another name for `initialize()`."""
        return self.initialize()

    @property
    def element_spec(self) -> Nest:
        """Shapes and dtypes of the first replica's part of a full element."""
        if self._dataset.continues and not self._closed:
            self._peek(1)  # so that the dataset has seen an element
        return self._dataset.element_spec

    def _refusal(self) -> ReplicaxError:
        return NotInitialized(
            f"{self!r} must be initialized before it gives elements. Call "
            "`iterator.initialize()`, and again for every further pass."
        )


@final
class Optional:
    """An element of a dataset, or nothing; see `get_next_as_optional`."""

    __slots__ = ("_value",)

    def __init__(self, value: tuple[()] | tuple[Nest]) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Tell whether there was an element."""
        return bool(self._value)

    def get_value(self) -> Nest:
        """Return the element."""
        if not self._value:
            raise InvalidArgument(
                "There was no element: the dataset was at its end. Ask `has_value()` first."
            )
        return self._value[0]

    def __repr__(self) -> str:
        return f"Optional({self._value[0]!r})" if self._value else "Optional()"


def require_iterator(value: object) -> DistributedIterator:
    """Refuse anything but an iterator over a distributed dataset."""
    if not isinstance(value, DistributedIterator):
        raise InvalidType(
            f"Elements are taken from an iterator over a distributed dataset; got {value!r}. Make "
            "one: `iter(strategy.experimental_distribute_dataset(dataset))`."
        )
    return value


def _require_untraced(method: str) -> None:
    if get_opaque_trace_state() != _untraced:
        raise ContextError(
            f"`{method}` of a distributed iterator was called while JAX traces a function, such as "
            "one given to `jax.jit`, where the element would become a constant. Use `rx.function`, "
            "or take the element outside and pass it in."
        )


def _outside_of_replicas(method: str) -> Frame:
    frame = _context.current()
    if frame.kind is not ContextKind.CROSS_REPLICA and frame.strategy is not None:
        raise ContextError(
            f"`{method}` of a distributed iterator gives an element for all replicas and needs "
            f"cross-replica context. Current context: {frame}. Take the element outside, and give "
            "it to `run`: `strategy.run(fn, args=(next(iterator),))`."
        )
    return frame
