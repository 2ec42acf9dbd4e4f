"""What users iterate over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Protocol, final

import jax
from jax.dtypes import canonicalize_dtype

from replicax import _context
from replicax._context import Frame, Kind
from replicax._enums import InputReplicationMode
from replicax._typing import Nest
from replicax.errors import ContextError, InvalidArgument, InvalidType, NotPicklable
from replicax.input._feed import Feed, SplittingFeed, Step, TakingFeed, first_step
from replicax.input._options import InputContext, InputOptions
from replicax.input._prefetch import Ahead
from replicax.input._sharding import shard
from replicax.input._source import Source
from replicax.input._splitting import Workers
from replicax.input._transfer import to_devices, to_host
from replicax.input.sources import source_of
from replicax.topology import Topology

Prepared = tuple[Nest, dict[str, Any]]  # an element, and where the pass stands after it


def distribute(
    dataset: Any, topology: Topology, options: InputOptions | None
) -> DistributedDataset:
    """Of a dataset of global batches."""
    options = _checked(options)
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise InvalidArgument(
            "PER_REPLICA means that each replica has a dataset of its own, and "
            "`experimental_distribute_dataset` divides one among them. Use "
            "`distribute_datasets_from_function`, or PER_WORKER."
        )
    _refuse_distributed(dataset)
    source = source_of(dataset)
    if options.global_batch_size is not None:
        source = source.batched(options.global_batch_size)
    workers = Workers.of(topology)
    source, own = shard(source, workers, options.auto_shard_policy)
    return DistributedDataset(
        topology,
        options,
        functools.partial(SplittingFeed, source, workers, own),
        # How many steps a batch takes is known without reading it if it takes one.
        _Length(source.length if workers.count == 1 or not own else None, source.infinite),
    )


def distribute_from_function(
    dataset_fn: Callable[[InputContext], Any], topology: Topology, options: InputOptions | None
) -> DistributedDataset:
    """Of datasets of the replicas' batches, which a function makes."""
    options = _checked(options)
    if not callable(dataset_fn):
        raise InvalidType(
            f"`dataset_fn` has to be a function of an `rx.InputContext`; got {dataset_fn!r}. To "
            "distribute a dataset that is there, use `experimental_distribute_dataset`."
        )
    if options.global_batch_size is not None:
        raise InvalidArgument(
            "`global_batch_size` batches a dataset that `experimental_distribute_dataset` divides; "
            f"got {options.global_batch_size}. Here `dataset_fn` makes the batches, of "
            "`input_context.get_per_replica_batch_size(global_batch_size)` rows."
        )
    workers = Workers.of(topology)
    replicas = workers.replicas
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        contexts = [InputContext(replicas, replica, replicas) for replica in workers.local]
    else:
        contexts = [InputContext(workers.count, workers.index, replicas)]
    datasets = [dataset_fn(context) for context in contexts]
    for dataset in datasets:
        _refuse_distributed(dataset)
    sources = [source_of(dataset) for dataset in datasets]
    return DistributedDataset(
        topology,
        options,
        functools.partial(TakingFeed, sources, len(workers.local)),
        _Length.of_steps(sources, len(workers.local)),
    )


def _checked(options: InputOptions | None) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise InvalidType(f"`options` has to be an `rx.InputOptions`; got {options!r}.")
    return options


def _refuse_distributed(dataset: Any) -> None:
    if isinstance(dataset, (DistributedDataset, DistributedIterator)):
        raise InvalidType(
            f"{dataset!r} is distributed already. Distribute the dataset that it was made of."
        )


@final
class _Length:
    """How many steps there are, as far as is known."""

    def __init__(self, steps: int | None, infinite: bool) -> None:
        self.steps = steps
        self.infinite = infinite

    @classmethod
    def of_steps(cls, sources: list[Source], replicas: int) -> _Length:
        """Of a step that takes one element a replica."""
        lengths = [source.length for source in sources]
        each = replicas // len(sources)
        known = [-(-length // each) for length in lengths if length is not None]
        return cls(
            max(known) if len(known) == len(lengths) else None,
            any(source.infinite for source in sources),
        )


@final
class DistributedDataset:
    """A dataset whose elements have a part for every replica; iterate over it as often as you like.

    Made by `Strategy.experimental_distribute_dataset` and
    `Strategy.distribute_datasets_from_function`.

    >>> import numpy as np, replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> batches = [np.arange(4), np.arange(4, 6)]
    >>> for element in strategy.experimental_distribute_dataset(batches):
    ...     print(element)
    PerReplica:{
      0: Array([0, 1], dtype=int32),
      1: Array([2, 3], dtype=int32)
    }
    PerReplica:{
      0: Array([4, 5], dtype=int32),
      1: Array([], shape=(0,), dtype=int32)
    }
    """

    def __init__(
        self,
        topology: Topology,
        options: InputOptions,
        begin: Callable[[Any], Feed],
        length: _Length,
    ) -> None:
        self._topology = topology
        self._options = options
        self._begin = begin
        self._length = length
        self._spec: Nest | None = None
        self._kept: list[Prepared] | None = None

    def __iter__(self) -> DistributedIterator:
        program = _context.current().program
        if program is not None:
            program.loop()
        return DistributedIterator(self)

    def __len__(self) -> int:
        if self._length.steps is not None:
            return self._length.steps
        why = "it never ends" if self._length.infinite else "that shows only in reading it"
        raise InvalidType(f"The number of steps of {self!r} is not known: {why}.")

    @property
    def element_spec(self) -> Nest:
        """Shapes and dtypes of the first replica's part of a full element.

        Reads an element, unless one has been read before.
        """
        if self._spec is None:
            step = first_step(self._begin(None))
            if step is None:
                raise InvalidArgument(
                    f"{self!r} is empty, so that there is no element to describe."
                )
            self._note_spec(step)
        return self._spec

    def _note_spec(self, step: Step) -> None:
        firsts = [column[0] for column in step.columns]
        self._spec = jax.tree.unflatten(
            step.structure,
            [jax.ShapeDtypeStruct(a.shape, canonicalize_dtype(a.dtype)) for a in firsts],
        )

    def start(self, steps: int, feed_state: Any) -> _Elements:
        """A pass, from where another one stood after so many steps."""
        if self._kept is not None:
            return _FromMemory(self._kept, steps)
        begin: Callable[[], Feed] = functools.partial(self._begin, None)
        if feed_state is not None:
            begun = self._begin(feed_state)  # here, so that a state that does not fit is refused
            begin = functools.partial(_given, begun)
        depth = self._options.experimental_per_replica_buffer_size
        ahead = Ahead(begin, self._prepare, depth)
        if self._options.experimental_place_dataset_on_device and steps == 0:
            return _Keeping(ahead, self)
        return ahead

    def keep(self, elements: list[Prepared]) -> None:
        """From now on all passes give these."""
        self._kept = elements

    def _prepare(self, step: Step) -> Prepared:
        if self._spec is None:
            self._note_spec(step)
        options = self._options
        fetch = options.experimental_fetch_to_device or options.experimental_place_dataset_on_device
        return (to_devices if fetch else to_host)(step, self._topology), step.state

    def __repr__(self) -> str:
        steps = "?" if self._length.steps is None else self._length.steps
        return f"<DistributedDataset: {steps} steps over {self._topology.num_replicas} replica(s)>"

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(f"{self!r} cannot be pickled: it is for the devices of this process.")


@final
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

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._steps = 0
        self._feed_state: Any = None
        self._elements: _Elements | None = None
        self._closed = False

    def __iter__(self) -> DistributedIterator:
        program = _context.current().program
        if program is not None:
            program.loop()
        return self

    def __next__(self) -> Nest:
        frame = _outside_of_replicas("next")
        if frame.program is not None:
            return frame.program.pull(self)
        element, state = self._started().take()
        self._steps += 1
        self._feed_state = state
        return element

    def get_next(self) -> Nest:
        """The next element; the same as `next(iterator)`."""
        return next(self)

    def get_next_as_optional(self) -> Optional:
        """The next element, or the lack of one, without StopIteration."""
        program = _outside_of_replicas("get_next_as_optional").program
        if program is not None:
            program.loop()
        try:
            return Optional((next(self),))
        except StopIteration:
            return Optional(())

    def peek(self, count: int) -> list[Nest]:
        """The next `count` elements, which stay the next; fewer, where no more can be had."""
        return [element for element, _ in self._started().peek(count)]

    @property
    def element_spec(self) -> Nest:
        """Shapes and dtypes of the first replica's part of a full element."""
        return self._dataset.element_spec

    def get_state(self) -> dict[str, Any]:
        """How far the pass has come: what JSON can express, and `set_state` understands.

        Elements that have been prepared but not given out count as not seen.
        """
        return {"steps": self._steps, "feed": self._feed_state}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from where another iterator over the same data stood, in any process.

        Prefetch depth, strategy and number of replicas may be others than there.
        """
        if not isinstance(state, Mapping) or set(state) != {"steps", "feed"}:
            raise InvalidArgument(
                f"This is not what `get_state` of a DistributedIterator returned: {state!r}."
            )
        try:
            elements = self._dataset.start(state["steps"], state["feed"])
        except (KeyError, TypeError) as error:
            raise InvalidArgument(
                f"The state is one of another kind of dataset: {state!r} ({error!r})."
            ) from error
        self._end_pass()
        self._elements = elements
        self._steps, self._feed_state, self._closed = state["steps"], state["feed"], False

    def close(self) -> None:
        """Ends the thread that works ahead. It also ends with the pass, or when unreferenced."""
        self._closed = True
        self._end_pass()

    def _end_pass(self) -> None:
        if self._elements is not None:
            self._elements.close()
            self._elements = None

    def _started(self) -> _Elements:
        """Begun when it is first needed, so that `set_state` right after `iter` reads nothing."""
        if self._closed:
            raise InvalidArgument(f"{self!r} has been closed. Make a new one: `iter(dataset)`.")
        if self._elements is None:
            self._elements = self._dataset.start(self._steps, self._feed_state)
        return self._elements

    def __repr__(self) -> str:
        return f"<DistributedIterator after {self._steps} step(s) of {self._dataset!r}>"

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(
            f"{self!r} cannot be pickled. Pickle `iterator.get_state()`, and give it to "
            "`set_state` of a new iterator."
        )


@final
class Optional:
    """An element of a dataset, or the lack of one; see `get_next_as_optional`."""

    __slots__ = ("_value",)

    def __init__(self, value: tuple[()] | tuple[Nest]) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Whether there was an element."""
        return bool(self._value)

    def get_value(self) -> Nest:
        """The element."""
        if not self._value:
            raise InvalidArgument(
                "There was no element: the dataset was at its end. Ask `has_value()` first."
            )
        return self._value[0]

    def __repr__(self) -> str:
        return f"Optional({self._value[0]!r})" if self._value else "Optional()"


class _Elements(Protocol):
    """Where an iterator takes its elements from."""

    def peek(self, count: int) -> list[Prepared]: ...

    def take(self) -> Prepared: ...

    def close(self) -> None: ...


@final
class _Keeping:
    """Takes from another one, and gives the dataset all of it to keep if it comes to the end."""

    def __init__(self, elements: _Elements, dataset: DistributedDataset) -> None:
        self._elements = elements
        self._dataset = dataset
        self._seen: list[Prepared] = []

    def peek(self, count: int) -> list[Prepared]:
        return self._elements.peek(count)

    def take(self) -> Prepared:
        try:
            prepared = self._elements.take()
        except StopIteration:
            self._dataset.keep(self._seen)
            raise
        self._seen.append(prepared)
        return prepared

    def close(self) -> None:
        self._elements.close()


@final
class _FromMemory:
    """Takes from what was kept."""

    def __init__(self, kept: list[Prepared], position: int) -> None:
        self._kept = kept
        self._rest: Iterator[Prepared] = iter(kept[position:])
        self._position = position

    def peek(self, count: int) -> list[Prepared]:
        return self._kept[self._position : self._position + count]

    def take(self) -> Prepared:
        prepared = next(self._rest)
        self._position += 1
        return prepared

    def close(self) -> None:
        return


def _given(feed: Feed) -> Feed:
    return feed


def _outside_of_replicas(method: str) -> Frame:
    frame = _context.current()
    if frame.kind is not Kind.CROSS_REPLICA and frame.strategy is not None:
        raise ContextError(
            f"`{method}` of a distributed iterator gives an element for all replicas and needs "
            f"cross-replica context. Current context: {frame}. Take the element outside, and give "
            "it to `run`: `strategy.run(fn, args=(next(iterator),))`."
        )
    return frame
