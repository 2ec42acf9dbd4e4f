"""Scheduled functions, their results, and the queue in which they wait for a worker."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable
from typing import Any, final

import jax.numpy as jnp

from replicax import _nest
from replicax._typing import Nest
from replicax.coordinator._programs import Scheduled
from replicax.errors import ClosureCancelled

# More closures than this wait for a worker before `schedule` waits too.
_MOST_WAITING = 10_000
_MOST_WORKERS = 1000  # each of which has one closure
_LOOK_SECONDS = 1.0  # Python handles signals, such as that of Ctrl-C, between two looks


@final
class RemoteValue:
    """The result of a scheduled function, which may not be there yet.

    It is kept by the coordinator, so it outlives the worker that has computed it.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._outcome: Callable[[], Nest] | None = None

    def fetch(self) -> Nest:
        """Wait for the result, and return it with NumPy arrays.

        An error of the function is raised.
        """
        with self._changed:
            while self._outcome is None:
                self._changed.wait(_LOOK_SECONDS)
        return self._outcome()

    def get(self) -> Nest:
        """Wait for the result, and return it with JAX arrays."""
        return _nest.transform(_on_device, self.fetch())

    def _settle(self, outcome: Callable[[], Nest]) -> None:
        self._outcome = outcome

    def __repr__(self) -> str:
        return f"<rx.coordinator.RemoteValue{'' if self._outcome else ', not there yet'}>"


def _on_device(leaf: Any) -> Any:
    return jnp.asarray(leaf) if hasattr(leaf, "dtype") else leaf


@final
class Closure:
    """A scheduled function on its way.

    Args:
      number: Its number, in the order in which closures are scheduled.
      scheduled: What is run.
      value: Its result.
    """

    def __init__(self, number: int, scheduled: Scheduled, value: RemoteValue) -> None:
        self.number, self.scheduled, self.value = number, scheduled, value


@final
class ClosureQueue:
    """The closures that are not done, in one order for all workers.

    After the first error, those that wait are cancelled, and those that run are awaited. The error
    is raised once: by `schedule`, `join` or `done`.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._waiting: collections.deque[Closure] = collections.deque()
        self._running: set[int] = set()
        self._error: Exception | None = None
        self._next = 0
        self._stopped = False

    def put(self, scheduled: Scheduled) -> RemoteValue:
        """Add a closure; wait while there are very many."""
        with self.changed:
            while len(self._waiting) >= _MOST_WAITING and self._error is None:
                self.changed.wait(_LOOK_SECONDS)
            self._raise_error()
            value = RemoteValue(self.changed)
            self._waiting.append(Closure(self._next, scheduled, value))
            self._next += 1
            self.changed.notify_all()
            return value

    def take(self, look: Callable[[], None] = lambda: None) -> Closure | None:
        """Wait for a closure to run; None if there will be no more.

        `look` is called whenever something has changed, and may raise.
        """
        with self.changed:
            look()
            while not self._waiting:
                if self._stopped:
                    return None
                self.changed.wait()
                look()
            closure = self._waiting.popleft()
            self._running.add(closure.number)
            return closure

    def wake(self) -> None:
        """Have those that wait in `take` look."""
        with self.changed:
            self.changed.notify_all()

    def put_back(self, closure: Closure) -> None:
        """Have another worker run a closure whose worker was lost, before all others."""
        with self.changed:
            self._running.discard(closure.number)
            if self._error is None:
                # Few are put back, and `settled` needs the smallest number first.
                place = sum(other.number < closure.number for other in self._head())
                self._waiting.insert(place, closure)
            else:
                self._cancel(closure, self._error)
            self.changed.notify_all()

    def _head(self) -> list[Closure]:
        """Return the closures at the front that may have been put back."""
        return list(itertools.islice(self._waiting, _MOST_WORKERS))

    def finish(self, closure: Closure, outcome: Callable[[], Nest]) -> None:
        """Note that a closure is done."""
        with self.changed:
            self._running.discard(closure.number)
            closure.value._settle(outcome)
            self.changed.notify_all()

    def fail(self, closure: Closure, error: Exception) -> None:
        """Note the error of a closure; cancel those that wait."""
        with self.changed:
            self._running.discard(closure.number)
            closure.value._settle(lambda: _raise(error))
            self._note(error)

    def fail_all(self, error: Exception) -> None:
        """Cancel all closures, because none can be run."""
        with self.changed:
            if self._waiting:
                self._note(error)

    @property
    def settled(self) -> int:
        """The smallest number of a closure that is not done."""
        with self.changed:
            first = self._waiting[0].number if self._waiting else self._next
            return min((first, *self._running))

    def done(self) -> bool:
        """Tell whether all closures are done; raise the error of one that failed."""
        with self.changed:
            if self._error is not None:
                self.join()
            return not (self._waiting or self._running)

    def join(self) -> None:
        """Wait for all closures; raise the error of one that failed."""
        with self.changed:
            while self._waiting or self._running:
                self.changed.wait(_LOOK_SECONDS)
            self._raise_error()

    def stop(self) -> None:
        """Have `take` return None when nothing waits."""
        with self.changed:
            self._stopped = True
            self._waiting.clear()
            self.changed.notify_all()

    def _note(self, error: Exception) -> None:
        self._error = self._error or error
        while self._waiting:
            self._cancel(self._waiting.popleft(), error)
        self.changed.notify_all()

    def _cancel(self, closure: Closure, error: Exception) -> None:
        closure.value._settle(
            lambda: _raise(
                ClosureCancelled(
                    f"`{closure.scheduled.name}` was not run, because a function that was "
                    f"scheduled before it has failed: {type(error).__name__}: {error}. Schedule it "
                    "again."
                )
            )
        )

    def _raise_error(self) -> None:
        if self._error is None:
            return
        while self._running:  # no function is running when the caller sees the error
            self.changed.wait(_LOOK_SECONDS)
        error, self._error = self._error, None
        assert error is not None
        raise error


def _raise(error: Exception) -> Any:
    raise error
