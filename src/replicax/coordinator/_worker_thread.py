"""The threads of a coordinator: each gives closures to one worker, and starts it again."""

from __future__ import annotations

import collections
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, final

from replicax.coordinator._calls import Call, OtherElements
from replicax.coordinator._closure_worker import ClosureWorker
from replicax.coordinator._closures import Closure, ClosureQueue
from replicax.coordinator._programs import Program
from replicax.errors import WorkerLost
from replicax.parameter_server import Actor, ActorLost, Engine

_LOOK_SECONDS = 1.0
_LOOKS_BEFORE_ASKING = 10
_LIFE_SECONDS = 20.0
_STOPPING_SECONDS = 5 * _LOOK_SECONDS
_PAUSE_SECONDS = 0.2  # before a worker that was lost is started again


@final
class Presence:
    """The workers that are there. If none is for very long, closures fail instead of waiting.

    Args:
      queue: Has the closures.
      num_workers: The number of workers.
      seconds: How long that is.
    """

    def __init__(self, queue: ClosureQueue, num_workers: int, seconds: float = 300.0) -> None:
        self._queue, self._seconds = queue, seconds
        self._usable = num_workers
        self._up: set[int] = set()
        self._last_seen = time.monotonic()
        self._lock = threading.Lock()

    def note(self, index: int, *, is_up: bool) -> None:
        """Note that a worker has come, or is lost."""
        with self._lock:
            self._last_seen = time.monotonic()
            if is_up:
                self._up.add(index)
            else:
                self._up.discard(index)

    def give_up(self, error: Exception) -> None:
        """Note that a worker cannot be used at all; closures fail if it is the last one."""
        with self._lock:
            self._usable -= 1
            last = not self._usable
        if last:
            self._queue.fail_all(error)

    def look(self) -> None:
        """Have all closures fail if no worker has been there for too long."""
        with self._lock:
            late = not self._up and time.monotonic() - self._last_seen > self._seconds
            if late:
                self._last_seen = time.monotonic()
        if late:
            self._queue.fail_all(
                WorkerLost(
                    f"No worker has been there for {self._seconds:g} s, and functions are waiting "
                    "for one. Start the workers again, and schedule the functions again."
                )
            )


@final
class WorkerThread:
    """A worker, and the thread that gives it closures.

    Args:
      index: The index of the worker.
      engine: Starts it.
      queue: Has the closures.
      presence: Is told whether the worker is there.
      settings: JAX settings for the worker.
    """

    def __init__(
        self,
        index: int,
        engine: Engine,
        queue: ClosureQueue,
        presence: Presence,
        settings: Mapping[str, Any],
    ) -> None:
        self._index, self._engine, self._queue = index, engine, queue
        self._presence, self._settings = presence, settings
        self._actor: Actor | None = None
        self._platform: str | None = None
        self._is_up = threading.Event()
        self._is_lost = threading.Event()  # as another thread has found
        self.failure: Exception | None = None  # why it cannot be used at all
        self._stopping = threading.Event()
        # What the worker has.
        self._programs: set[int] = set()
        self._iterators: set[int] = set()
        self._forgotten: collections.deque[int] = collections.deque()
        self._thread = threading.Thread(
            target=self._serve, name=f"replicax worker {index}", daemon=True
        )
        self._thread.start()

    @property
    def is_up(self) -> bool:
        return self._is_up.is_set()

    def platform(self) -> str | None:
        """Return the platform of the worker, or None if it is not there."""
        return self._platform if self.is_up else None

    def examples(self, number: int, dataset: Any, count: int) -> list[Any] | None:
        """Return examples of the next elements of an iterator, or None if the worker is lost."""
        actor = self._actor
        if actor is None or not self.is_up or self._is_lost.is_set():
            return None
        try:
            return self._patiently(actor.ask("examples", number, dataset, count))
        except ActorLost:
            self._is_lost.set()
            self._queue.wake()
            return None

    def forget(self, number: int) -> None:
        """Note that the worker need not keep an iterator; it hears of it with the next closure."""
        self._forgotten.append(number)

    def stop(self) -> None:
        """End the thread, which waits for nothing much longer than a look takes."""
        self._stopping.set()
        self._thread.join(_STOPPING_SECONDS)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            try:
                self._start()
                self._run_closures()
                return
            except ActorLost as error:
                if self.is_up and not self._stopping.is_set():
                    print(
                        f"replicax: worker {self._index} is lost: {error}. It is started again.",
                        file=sys.stderr,
                        flush=True,
                    )
                self._leave()
                self._stopping.wait(_PAUSE_SECONDS)
            except Exception as error:  # it would come again
                self._leave()
                print(
                    f"replicax: worker {self._index} cannot be used: {type(error).__name__}: "
                    f"{error}",
                    file=sys.stderr,
                    flush=True,
                )
                self.failure = error
                self._presence.give_up(error)
                return

    def _leave(self) -> None:
        self._is_up.clear()
        self._presence.note(self._index, is_up=False)

    def _start(self) -> None:
        self._programs.clear()
        self._iterators.clear()
        self._is_lost.clear()
        self._actor = self._engine.start_worker(
            self._index, ClosureWorker, self._index, self._engine.servers, self._settings
        )
        self._platform = self._patiently(self._actor.ask("platform"))
        self._is_up.set()
        self._presence.note(self._index, is_up=True)

    def _run_closures(self) -> None:
        while (closure := self._queue.take(self._require_not_lost)) is not None:
            try:
                self._run(closure)
            except ActorLost:
                self._queue.put_back(closure)
                raise
            except Exception as error:
                error.add_note(f"`{closure.scheduled.name}` was run by worker {self._index}.")
                self._queue.fail(closure, error)

    def _require_not_lost(self) -> None:
        if self._is_lost.is_set():
            raise ActorLost("its process has ended")

    def _run(self, closure: Closure) -> None:
        scheduled = closure.scheduled
        program = scheduled.programs.last
        assert program is not None
        answer = self._ask(closure, program)
        while isinstance(answer, OtherElements):
            program = scheduled.programs.of_elements(answer.examples)
            answer = self._ask(closure, program)
        arrays, outputs = answer, program.traced.outputs
        self._queue.finish(closure, lambda: outputs.rebuild(arrays, None))

    def _ask(self, closure: Closure, program: Program) -> Any:
        scheduled = closure.scheduled
        call = Call(
            closure.number,
            self._queue.settled,
            program.number,
            {index: scheduled.arrays[index] for index in program.arguments},
            [iterator._number for iterator in scheduled.iterators],
        )
        if program.number not in self._programs:
            call.programs[program.number] = program.for_workers
        for iterator in scheduled.iterators:
            if iterator._number not in self._iterators:
                call.datasets[iterator._number] = iterator._dataset
        while self._forgotten:
            number = self._forgotten.popleft()
            self._iterators.discard(number)
            call.forgotten.append(number)
        assert self._actor is not None
        answer = self._patiently(self._actor.ask("run", call))
        self._programs |= call.programs.keys()
        self._iterators |= call.datasets.keys()
        return answer

    def _patiently(self, reply: Any) -> Any:
        """Wait for an answer as long as the worker is there, and says so now and then."""
        looks = 0
        while True:
            try:
                return reply.result(_LOOK_SECONDS)
            except TimeoutError:
                if self._stopping.is_set():
                    raise ActorLost("the program is ending") from None
            self._presence.look()
            looks += 1
            if looks % _LOOKS_BEFORE_ASKING == 0 and self.is_up:
                self._require_life()

    def _require_life(self) -> None:
        """Give up a worker whose process is stopped, or cannot be reached any more."""
        assert self._actor is not None
        try:
            self._actor.process().result(_LIFE_SECONDS)
        except TimeoutError:
            self._actor.end()
            raise ActorLost(
                f"its process has not answered for {_LIFE_SECONDS:g} s, and is given up"
            ) from None
