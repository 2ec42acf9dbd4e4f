"""Distributed datasets, which users iterate over."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, final

import jax
from jax.dtypes import canonicalize_dtype

from replicax import _context, cluster
from replicax._enums import InputReplicationMode
from replicax._typing import DatasetLike, Nest
from replicax.errors import InvalidArgument, InvalidType, NotPicklable
from replicax.input._agreement import AgreeingFeed, InTurn, OfferingFeed
from replicax.input._element_supply import (
    CachedSupply,
    CachingSupply,
    ElementSupply,
    Prepared,
    WatchedSupply,
)
from replicax.input._feed import Feed, SplittingFeed, Step, TakingFeed, first_step
from replicax.input._iterator import DistributedIterator
from replicax.input._options import InputContext, InputOptions
from replicax.input._prefetch import PrefetchedProducer, Prefetcher
from replicax.input._row_splitting import Workers
from replicax.input._sharding import shard
from replicax.input._source import Source
from replicax.input._transfer import owned, to_devices, to_host
from replicax.input.sources import source_of
from replicax.topology import Topology

Given = TypeVar("Given")
INFINITE_CARDINALITY = -1
UNKNOWN_CARDINALITY = -2


def distribute(
    dataset: object, topology: Topology, options: InputOptions | None
) -> DistributedDataset:
    """Distribute a dataset of global batches."""
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
    workers = Workers.of(topology, options.partial_batches)
    source, own = shard(source, workers, options.auto_shard_policy)
    return DistributedDataset(
        topology,
        options,
        functools.partial(SplittingFeed, source, workers, own),
        # The number of steps is known without reading only if each batch takes one step.
        _Length(source.length if workers.count == 1 or not own else None, source.infinite),
        source.quick,
        reads_alike=not own,
    )


def distribute_from_function(
    dataset_fn: Callable[[InputContext], DatasetLike],
    topology: Topology,
    options: InputOptions | None,
) -> DistributedDataset:
    """Distribute datasets of per-replica batches that a function makes."""
    options = _checked(options)
    if not callable(dataset_fn):
        raise InvalidType(
            f"`dataset_fn` must be a function of an `rx.InputContext`; got {dataset_fn!r}. To "
            "distribute an existing dataset, use `experimental_distribute_dataset`."
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
    endless = any(source.infinite for source in sources)
    if options.experimental_place_dataset_on_device and endless:
        raise InvalidArgument(
            "A dataset that never ends cannot be kept on the devices "
            "(`experimental_place_dataset_on_device`). Leave `repeat()` out: a dataset on the "
            "device is read once, however often you iterate over it."
        )
    length = _Length.of_steps(sources, len(workers.local))
    if topology.spans_processes:
        length = _Length.of_workers(
            cluster.current().all_gather("making a dataset", [length.steps, length.infinite])
        )
    return DistributedDataset(
        topology,
        options,
        functools.partial(TakingFeed, sources, len(workers.local)),
        length,
        all(source.quick for source in sources),
        reads_alike=False,
        continues=any(source.continues for source in sources),
    )


def _checked(options: InputOptions | None) -> InputOptions:
    if options is None:
        return InputOptions()
    if not isinstance(options, InputOptions):
        raise InvalidType(f"`options` must be an `rx.InputOptions`; got {options!r}.")
    return options


def _refuse_distributed(dataset: object) -> None:
    if isinstance(dataset, (DistributedDataset, DistributedIterator)):
        raise InvalidType(
            f"{dataset!r} is distributed already. Distribute the dataset that it was made of."
        )


@final
class _Length:
    """The number of steps, as far as it is known."""

    def __init__(self, steps: int | None, infinite: bool) -> None:
        self.steps = steps
        self.infinite = infinite

    @classmethod
    def of_steps(cls, sources: list[Source], replicas: int) -> _Length:
        """Return the length if a step takes one element per replica."""
        lengths = [source.length for source in sources]
        each = replicas // len(sources)
        known = [-(-length // each) for length in lengths if length is not None]
        return cls(
            max(known) if len(known) == len(lengths) else None,
            any(source.infinite for source in sources),
        )

    @staticmethod
    def of_workers(lengths: list[tuple[int | None, bool]]) -> _Length:
        """Return the length for all workers, which continue while one of them has an element."""
        steps = [each for each, _ in lengths if each is not None]
        return _Length(
            max(steps) if len(steps) == len(lengths) else None,
            any(infinite for _, infinite in lengths),
        )


@final
class DistributedDataset:
    """A dataset whose elements have a part for every replica; iterate over it as often as you like.

    `Strategy.experimental_distribute_dataset` and `Strategy.distribute_datasets_from_function`
    make it.

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
      0: Array([4], dtype=int32),
      1: Array([5], dtype=int32)
    }
    """

    def __init__(
        self,
        topology: Topology,
        options: InputOptions,
        begin: Callable[[Any], Feed],
        length: _Length,
        quick: bool,
        reads_alike: bool,
        continues: bool = False,
    ) -> None:
        self._topology = topology
        self._options = options
        self._begin = begin
        self._length = length
        self._quick = quick
        self._reads_alike = reads_alike
        self.continues = continues
        self._spec: Nest | None = None
        self._kept: list[Prepared] | None = None
        if topology.spans_processes:
            self._topic = f"dataset {cluster.current().number('dataset')}"

    def __iter__(self) -> DistributedIterator:
        program = _context.current().program
        if program is not None:
            program.loop()
        return DistributedIterator(self)

    def __len__(self) -> int:
        if self.cardinality >= 0:
            return self.cardinality
        why = "it never ends" if self._length.infinite else "that shows only in reading it"
        raise InvalidType(f"The number of steps of {self!r} is not known: {why}.")

    @property
    def topology(self) -> Topology:
        """The replicas that it is divided over."""
        return self._topology

    @property
    def cardinality(self) -> int:
        """The number of steps of a pass, as `len` returns it, or one of two negative numbers.

        `rx.experimental.INFINITE_CARDINALITY` (-1) means that it never ends, and
        `rx.experimental.UNKNOWN_CARDINALITY` (-2) that its length shows only when it is read.
        """
        if self._length.steps is not None:
            return self._length.steps
        return INFINITE_CARDINALITY if self._length.infinite else UNKNOWN_CARDINALITY

    @property
    def element_spec(self) -> Nest:
        """Shapes and dtypes of the first replica's part of a full element.

        Getting it reads an element, unless one has been read before.
        """
        if self._spec is None and self.continues:
            raise InvalidArgument(
                f"What the elements of {self!r} are like is not known before one has been read, "
                "and a function that gives them cannot be called for nothing. Initialize its "
                "iterator, and ask that."
            )
        if self._spec is None:
            step = first_step(self._begin(None))
            if step is None:
                raise InvalidArgument(
                    f"{self!r} is empty, so that there is no element to describe."
                )
            self._note_spec(step)
        return self._spec

    def _note_spec(self, step: Step) -> None:
        firsts = [column[0] for column in step.columns()]
        shapes = [array.shape for array in firsts]
        if step.full_share is not None:  # This worker's first replica may have fewer rows.
            shapes = [(step.full_share, *shape[1:]) for shape in shapes]
        self._spec = jax.tree.unflatten(
            step.structure,
            [
                jax.ShapeDtypeStruct(shape, canonicalize_dtype(array.dtype))
                for shape, array in zip(shapes, firsts, strict=True)
            ],
        )

    def _start(self, steps: int, feed_state: object) -> ElementSupply:
        """Start a pass at the point that another one had reached after this many steps."""
        if self._kept is not None:
            return CachedSupply(self._kept, steps)
        together = self._topology.spans_processes
        # Refused states are counted too, because another one may be tried next.
        number = cluster.current().number(self._topic) if together else 0
        begin = functools.partial(self._begin, feed_state)
        if feed_state is not None:  # begun now, so that a state that does not fit is refused
            begin = functools.partial(_given, begin())
        depth = self._options.experimental_per_replica_buffer_size
        prepare = functools.partial(self._prepare, steps == 0)
        if together:
            elements: ElementSupply = self._start_together(number, begin, prepare, depth)
        elif self._quick:
            elements = Prefetcher(begin, prepare, depth)
        else:
            reader = PrefetchedProducer(begin, owned)
            elements = Prefetcher(functools.partial(_given, reader), prepare, depth, reader.steps)
        if self._options.experimental_place_dataset_on_device and steps == 0:
            return CachingSupply(elements, self._keep)
        return elements

    def _start_together(
        self,
        number: int,
        begin: Callable[[], Feed],
        prepare: Callable[[Step], Prepared],
        depth: int,
    ) -> ElementSupply:
        """Start a pass that all workers make together, identified by its number."""
        session, closed = cluster.current(), threading.Event()
        replicas = len(self._topology.local_replicas)
        offering = OfferingFeed(begin, replicas, session, f"{self._topic}/pass {number}")
        reader = (
            None if self._quick else PrefetchedProducer(functools.partial(_given, offering), _given)
        )
        feed = AgreeingFeed(offering, reader or InTurn(offering), replicas, session, closed)
        upstream = None if reader is None else reader.steps
        ahead = Prefetcher(functools.partial(_given, feed), prepare, depth, upstream, closed)
        return WatchedSupply(ahead, session)

    def _keep(self, elements: list[Prepared]) -> None:
        """Use these elements for all passes from now on."""
        self._kept = elements

    def _prepare(self, from_start: bool, step: Step) -> Prepared:
        if self._spec is None and from_start and step.read:  # later ones may be partial
            self._note_spec(step)
        options = self._options
        fetch = options.experimental_fetch_to_device or options.experimental_place_dataset_on_device
        return (to_devices if fetch else to_host)(step, self._topology), step.state

    def __repr__(self) -> str:
        steps = "?" if self._length.steps is None else self._length.steps
        return f"<DistributedDataset: {steps} steps over {self._topology.num_replicas} replica(s)>"

    def __reduce__(self) -> NoReturn:
        raise NotPicklable(f"{self!r} cannot be pickled: it is for the devices of this process.")


def _given(producer: Given) -> Given:
    return producer
