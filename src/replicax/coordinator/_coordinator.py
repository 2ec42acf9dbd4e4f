"""The coordinator, which schedules functions on the workers of a `ParameterServerStrategy`."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

import jax
import numpy as np

from replicax import _context, _nest
from replicax._describing import described
from replicax._typing import Leaf, Nest
from replicax.coordinator._closures import ClosureQueue, RemoteValue
from replicax.coordinator._per_worker import PerWorkerDataset, PerWorkerValues
from replicax.coordinator._programs import Programs, Scheduled
from replicax.coordinator._worker_thread import Presence, WorkerThread
from replicax.errors import ContextError, InvalidArgument, InvalidType, StartFailed, WorkerLost
from replicax.execution import Function, FunctionOfInstance, IteratorArgument
from replicax.strategies import ParameterServerStrategy

_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision")
_WORKERS_SECONDS = 120.0


@final
class ClusterCoordinator:
    """An object that has workers of a `ParameterServerStrategy` run functions, in parallel.

    A strategy has one coordinator: making it again returns the same.

    Args:
      strategy: The strategy.
    """

    strategy: ParameterServerStrategy
    _queue: ClosureQueue
    _programs: Programs
    _numbers: itertools.count[int]
    _threads: list[WorkerThread]
    _stop: weakref.finalize[..., ClusterCoordinator]

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        if not isinstance(strategy, ParameterServerStrategy):
            raise InvalidType(
                "A ClusterCoordinator needs an `rx.ParameterServerStrategy`; got "
                f"{described(strategy)}."
            )
        return strategy._companion(lambda: cls._made(strategy))

    @classmethod
    def _made(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        self = object.__new__(cls)
        self.strategy = strategy
        self._queue = ClosureQueue()
        self._programs = Programs(strategy._engine.servers)
        self._numbers = itertools.count()
        engine = strategy._engine
        settings = {name: getattr(jax.config, name) for name in _SETTINGS}
        presence = Presence(self._queue, engine.num_workers)
        self._threads = [
            WorkerThread(index, engine, self._queue, presence, settings)
            for index in range(engine.num_workers)
        ]
        # Also when the program ends, and then before the engine stops.
        self._stop = weakref.finalize(self, _stop, self._queue, self._threads)
        return self

    def schedule(
        self,
        fn: Any,
        args: Sequence[Nest] | None = None,
        kwargs: Mapping[str, Nest] | None = None,
    ) -> RemoteValue:
        """Have a worker call a function, and return without waiting for it.

        Functions begin in the order in which they are scheduled, and several run at the same time.
        If the worker is lost, another one runs the function again; what it writes to variables is
        applied once. The error of a function that was scheduled before may be raised here.

        Args:
          fn: An `rx.function`.
          args: Its arguments. Each worker has its own iterator for one of a per-worker dataset.
          kwargs: Its keyword arguments, likewise.
        """
        function, given = _checked(fn, () if args is None else args, kwargs or {})
        iterators: list[PerWorkerValues] = []

        def argument(leaf: Leaf) -> Leaf:
            if isinstance(leaf, RemoteValue):
                raise InvalidArgument(
                    "A RemoteValue was given to a scheduled function, and may not be there yet. "
                    "Give it `value.get()`, which waits; or do both in one function."
                )
            if not isinstance(leaf, PerWorkerValues):
                return leaf
            if leaf not in iterators:
                iterators.append(leaf)
            return IteratorArgument(iterators.index(leaf))

        given_args, given_kwargs = _nest.transform(argument, given, keep_opaque=True)
        variants, arrays = self._programs.variants(
            self.strategy, function, given_args, given_kwargs, self._platforms
        )
        if variants.last is None:
            variants.trace(lambda place, count: self._examples(iterators[place], count))
        scheduled = Scheduled(
            function.__name__,
            variants,
            [np.asarray(array) for array in arrays],
            iterators,
        )
        self._require_workers()
        return self._queue.put(scheduled)

    def join(self) -> None:
        """Wait for all scheduled functions.

        If one of them has failed, those that were waiting are cancelled, and its error is raised
        once nothing runs any more. After that, functions can be scheduled again.
        """
        self._queue.join()

    def done(self) -> bool:
        """Tell whether all scheduled functions are done; an error is raised as by `join`."""
        return self._queue.done()

    def fetch(self, val: Nest) -> Nest:
        """Return a nest with the results, as NumPy arrays, in place of RemoteValues."""
        return _nest.transform(
            lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val
        )

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Return a dataset that each worker makes for itself.

        Args:
          dataset_fn: A dataset, or a function without arguments that returns one. Each worker
            calls it, with an `experimental_get_current_worker_index()` of its own, for each `iter`
            of the result, and anew when it is started again.
        """
        return PerWorkerDataset(dataset_fn, self._numbers, self._forget)

    def _forget(self, number: int) -> None:
        for thread in self._threads:
            thread.forget(number)

    def _platforms(self) -> list[str]:
        """Return the platforms of the workers that are there; wait for the first one."""
        self._await_a_worker()
        return sorted({thread.platform() or "cpu" for thread in self._threads})

    def _examples(self, iterator: PerWorkerValues, count: int) -> list[Nest]:
        """Return examples of the next elements of an iterator, from any worker."""
        pause = threading.Event()
        while True:
            self._await_a_worker()
            for thread in self._threads:
                examples = thread.examples(iterator._number, iterator._dataset, count)
                if examples is not None:
                    if len(examples) < count:
                        raise StopIteration
                    return examples
            pause.wait(0.05)  # those that are lost are being started again

    def _await_a_worker(self) -> None:
        pause, deadline = threading.Event(), time.monotonic() + _WORKERS_SECONDS
        while not any(thread.is_up for thread in self._threads):
            self._require_workers()
            if time.monotonic() > deadline:
                raise WorkerLost(
                    f"No worker has been there for {_WORKERS_SECONDS:g} s, of "
                    f"{len(self._threads)}. Start them again; the logs are in Ray's folder."
                )
            pause.wait(0.05)

    def _require_workers(self) -> None:
        failures = [thread.failure for thread in self._threads]
        if all(failures):
            raise StartFailed(
                f"No worker can be used. Worker 0: {type(failures[0]).__name__}: {failures[0]}. "
                "Repair what is wrong there, and start the program again."
            ) from failures[0]

    def __repr__(self) -> str:
        return f"ClusterCoordinator({self.strategy!r})"


def _stop(queue: ClosureQueue, threads: Sequence[WorkerThread]) -> None:
    queue.stop()
    for thread in threads:
        thread.stop()


def experimental_get_current_worker_index() -> Any:
    """Return the index of the worker that runs this: a function that makes a dataset, or a closure.

    In a scheduled function it is an array.
    """
    closure = _context.current().closure
    if closure is None:
        raise ContextError(
            "`experimental_get_current_worker_index` was called where no worker runs the code. "
            f"Current context: {_context.current()}. Call it in a function that is given to "
            "`schedule` or to `create_per_worker_dataset`."
        )
    return closure.worker_index()


def _checked(
    fn: Any, args: Any, kwargs: Any
) -> tuple[Function, tuple[tuple[Nest, ...], dict[str, Nest]]]:
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise InvalidType(
            "`args` of `schedule` must be a tuple or a list, and `kwargs` a dict; got "
            f"{described(args)} and {described(kwargs)}. For a single argument write `args=(x,)`."
        )
    if isinstance(fn, FunctionOfInstance):
        fn, args = fn.function, (fn.instance, *args)
    if not isinstance(fn, Function):
        raise InvalidType(
            "`schedule` takes an `rx.function`, whose program can be sent to workers; got "
            f"{described(fn)}. Write `rx.function(fn)`."
        )
    return fn, (tuple(args), dict(kwargs))
