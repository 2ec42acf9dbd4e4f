"""Prefetching: a thread that makes elements ahead of their use."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, final

from replicax._deprecation import frames_to_the_user
from replicax._jax_compat import thread_configuration
from replicax.errors import InvalidArgument, PerformanceHint, ReplicaxError
from replicax.input._ending import EndOfData, input_failed

Item = TypeVar("Item")
Raw = TypeVar("Raw", covariant=True)

_THREAD_NAME = "replicax-input"
# How long to wait for an element before saying where its reader stands, in seconds.
_LONG = 60.0
# How long to wait for a thread that was asked to end and is not in the user's code, in seconds.
_PATIENCE = 5.0
# How long the interpreter's exit waits for threads in the user's code, which may block forever,
# in seconds.
_LAST_PATIENCE = 2.0


class Producer(Protocol[Raw]):
    """The object that the thread gets its items from."""

    def step(self) -> Raw: ...

    def close(self) -> None: ...


@final
class Prefetcher(Generic[Item]):
    """Items that a thread makes ahead of their use.

    The thread refers to the queue between the two, but not to this object: when this object is no
    longer referenced, the thread ends.

    Args:
      begin: Makes the producer; called in the thread.
      finish: Makes an item from what the producer returned.
      depth: How many items to keep ready; while they are, none are made.
      reader: Another `Prefetcher` that the producer takes from, which ends with this one.
      closed: Set when no more items are wanted, for a producer that may be waiting.
    """

    def __init__(
        self,
        begin: Callable[[], Producer[Raw]],
        finish: Callable[[Raw], Item],
        depth: int,
        reader: Prefetcher[Any] | None = None,
        closed: threading.Event | None = None,
    ) -> None:
        upstream = reader._queue if reader is not None else None
        self._queue: _Queue[Item] = _Queue(depth, upstream, closed or threading.Event())
        configured = thread_configuration()
        self._thread = threading.Thread(
            target=_work,
            args=(self._queue, begin, finish, configured),
            name=_THREAD_NAME,
            daemon=True,  # the user's source may block forever, and the interpreter must end
        )
        self._queue.thread = self._thread
        self._end: _End | None = None
        _open.add(self._queue)
        weakref.finalize(self, self._queue.close).atexit = False  # see `_end_all`
        self._thread.start()

    @property
    def reader(self) -> threading.Thread:
        """The thread that reads the source."""
        return self._queue.reader

    def peek(self, count: int) -> list[Item]:
        """Return the next `count` items; fewer if the end, or an error, comes first."""
        return self._queue.wait_for(count)

    def take(self) -> Item:
        """Return the next item, or raise the reason why there are no more."""
        if self._end is None:
            taken = self._queue.take()
            if not isinstance(taken, _End):
                return taken
            # The end is kept here and not in the queue: the traceback of an error comes to hold
            # the caller's frames, and so this object, which would leak if its finalizer held the
            # error through the queue.
            self._end = taken
        raise self._end.exception()

    def keep(self, count: int) -> None:
        """Keep at least `count` items ready."""
        self._queue.keep(count)

    def close(self) -> None:
        """End the thread, and wake the threads that wait for an item."""
        self._queue.close()
        if not self._queue.busy:  # otherwise it is in the user's code, for any length of time
            self._queue.join(_PATIENCE)


@final
class PrefetchedProducer:
    """A producer that prepares steps ahead, in a thread of its own.

    It hides the latency of slow sources and of the transfer to the devices, which takes half a
    millisecond while a step keeps the cores busy. It keeps two steps ready: with one, it would
    resume reading only when that was taken, by a thread that then holds the GIL.
    """

    def __init__(self, begin: Callable[[], Producer[Raw]], finish: Callable[[Raw], object]) -> None:
        self.steps: Prefetcher[Any] = Prefetcher(begin, finish, depth=2)

    def step(self) -> Any:
        try:
            return self.steps.take()
        except StopIteration:
            raise EndOfData from None

    def keep(self, count: int) -> None:
        """Read at least `count` steps ahead."""
        self.steps.keep(count)

    def close(self) -> None:
        self.steps.close()


@final
class _End:
    """The reason why there are no more items."""

    def __init__(self, reason: BaseException) -> None:
        self._reason = reason
        self._traceback = reason.__traceback__

    def exception(self) -> BaseException:
        """Return the error to raise each time an item is requested.

        At the end of the data it is a new exception, so that nothing here comes to hold the frames
        that it passes. An error gets its original traceback, without the frames of earlier raises.
        """
        if isinstance(self._reason, StopIteration):
            return StopIteration()
        return self._reason.with_traceback(self._traceback)


@final
class _Queue(Generic[Item]):
    """The queue between the producing and the consuming thread."""

    def __init__(self, depth: int, upstream: _Queue[Any] | None, closed: threading.Event) -> None:
        self._depth = depth
        self._upstream = upstream
        self._closed_event = closed
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()  # re-entrant: the garbage collector calls `close`
        self._reason: BaseException | None = None  # until the consuming side has taken it
        self._over = self._closed = False
        self.busy = False  # while the thread is in the user's code
        self.thread: threading.Thread | None = None

    @property
    def reader(self) -> threading.Thread:
        """The thread that reads the source: its own, or that of the upstream queue."""
        thread = self.thread if self._upstream is None else self._upstream.thread
        assert thread is not None
        return thread

    # The producing side.

    def wait_for_room(self) -> bool:
        """Wait until there is room for another item; return False if none is wanted any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            return not self._closed

    def put(self, item: Item) -> None:
        with self._changed:
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()

    def end(self, reason: BaseException) -> None:
        with self._changed:
            self._reason = reason
            self._over = True
            self._changed.notify_all()

    # The consuming side.

    def take(self) -> Item | _End:
        """Return the next item or, once, the reason why there is none."""
        with self._changed:
            if self._items or self.wait_for(1):
                self._changed.notify_all()
                return self._items.popleft()
            if self._closed:
                raise InvalidArgument(
                    "The iterator was closed while another thread waited for its next element."
                )
        self.join(_PATIENCE)
        if self._reason is None:
            raise ReplicaxError("The prefetching thread exited without reporting an error.")
        end, self._reason = _End(self._reason), None
        return end

    def keep(self, count: int) -> None:
        with self._changed:
            if count > self._depth:
                self._depth = count
                self._changed.notify_all()

    def wait_for(self, count: int) -> list[Item]:
        with self._changed:
            self.keep(count)
            while len(self._items) < count and not self._over and not self._closed:
                if not self._changed.wait(_LONG):
                    if self.thread is None or not self.thread.is_alive():
                        break
                    if threading.current_thread().name != _THREAD_NAME:  # replicax's own are silent
                        self._say_what_it_waits_for()
            return [self._items[index] for index in range(min(count, len(self._items)))]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._closed_event.set()
            self._items.clear()
            self._changed.notify_all()
        if self._upstream is not None:  # This queue's thread may be waiting for that one.
            self._upstream.close()

    def join(self, seconds: float) -> None:
        """Wait for the thread to end, for at most `seconds`."""
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(seconds)

    def _say_what_it_waits_for(self) -> None:
        frame = sys._current_frames().get(self.reader.ident or 0)
        where = "".join(traceback.format_stack(frame)[-3:])
        del frame
        warnings.warn(
            f"The next element of a dataset has not come for {_LONG:.0f} seconds. The thread that "
            f"reads the dataset stands at\n{where}Waiting on.",
            PerformanceHint,
            stacklevel=frames_to_the_user(),
        )


def _work(
    queue: _Queue[Item],
    begin: Callable[[], Producer[Raw]],
    finish: Callable[[Raw], Item],
    configured: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    """Make items, in the thread, until there are no more or none are wanted."""
    try:
        with configured():
            queue.busy = True
            producer = begin()
            try:
                while queue.wait_for_room():
                    queue.busy = True
                    raw = producer.step()
                    queue.busy = False
                    queue.put(finish(raw))
                    del raw
            finally:
                producer.close()
    except EndOfData:
        queue.end(StopIteration())
    except StopIteration as stop:  # Some function raised it; it must not look like the end.
        error = input_failed(traceback.format_tb(stop.__traceback__)[-1].strip())
        error.__cause__ = stop
        queue.end(error)
    except BaseException as reason:  # whatever it is, the caller that asks for the element gets it
        queue.end(reason)
    finally:
        queue.busy = False


_open: weakref.WeakSet[_Queue[Any]] = weakref.WeakSet()


@atexit.register  # registered after JAX's own handler, so that it runs first
def _end_all() -> None:
    """End all threads: one that uses JAX while the interpreter exits would abort the process."""
    queues = list(_open)
    for queue in queues:
        queue.close()
    deadline = time.monotonic() + _LAST_PATIENCE
    for queue in queues:
        queue.join(max(0.0, deadline - time.monotonic()))
