"""Eager execution: the replicas take turns as ordinary Python, each on its own device.

Replica 0 runs on the caller's thread. The others get a thread of their own when replica 0 first
waits for them, and run one at a time, in replica order, until each waits or returns: the baton
goes round. A function without collectives needs no threads at all. All cross-replica code runs on
the caller's thread, where a debugger expects it.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, final

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from replicax import _bridges, _context, _nest
from replicax._context import ContextKind, Frame
from replicax._deprecation import frames_to_the_user
from replicax._hints import hint
from replicax._jax_compat import thread_configuration
from replicax._typing import Nest, Values
from replicax.collectives import agree_on_unknown_shapes, regroup
from replicax.errors import CollectiveMismatch, MeetingInTrace
from replicax.execution._error_advice import add_recipe
from replicax.execution._executor import Executor
from replicax.execution._replica_context import Meeting, Merger, ReplicaContext
from replicax.execution._row_weights import row_weights
from replicax.execution._shared_creation import SharedCreations
from replicax.values import PerReplica, require_own_values, select
from replicax.variables import all_or_nothing, require_equal_copies

if TYPE_CHECKING:
    from replicax._typing import StrategyLike


_MANY_RUNS = 300  # after which the hint to compile is given
# How many seconds a failed `run` waits for a replica that is still busy.
_PATIENCE = 30.0
# How many seconds a replica may take to reach the next meeting before there is a warning.
_LONG = 60.0


@final
class EagerExecutor(Executor):
    """One call of the function per replica; a failure leaves every variable as it was."""

    def __init__(self) -> None:
        self._runs: Counter[Any] = Counter()

    def run(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> Nest:
        if not frame.uneven and frame.rehearsal is None:
            self._hint(fn)
        with all_or_nothing(frame) as frame:
            results = _Round(strategy, frame, fn, args, kwargs).play()
            assert frame.transaction is not None
            require_equal_copies(frame.transaction.written, "`run`")
            return regroup(results, strategy.topology, keep_opaque=True)

    def _hint(self, fn: Callable[..., object]) -> None:
        """Hint once that compiling is faster, for a function that is run again and again."""
        code = getattr(fn, "__code__", None)
        if code is None:
            return
        self._runs[code] += 1
        if self._runs[code] == _MANY_RUNS:
            hint(
                f"`{getattr(fn, '__qualname__', fn)}` has been run eagerly {_MANY_RUNS} times. "
                "Compiled it is faster: `strategy.run(rx.function(fn), ...)`, or `strategy.run` "
                "inside an `rx.function`."
            )


class _Phase(enum.Enum):
    NEW = "not started"
    RUNNING = "running"
    WAITING = "waiting"
    RETURNED = "returned"
    FAILED = "failed"


class _Released(BaseException):
    """A signal that unwinds a waiting replica after another failed; user code does not catch it."""


class _Player:
    """One replica in one round: its phase, the meeting it waits in, its result or error."""

    __slots__ = (
        "baton",
        "error",
        "meeting",
        "outcome",
        "phase",
        "result",
        "thread",
        "trace_state",
        "yielded",
    )

    def __init__(self) -> None:
        self.phase = _Phase.NEW
        self.meeting: Meeting | None = None
        self.outcome: Nest = None
        self.result: Nest = None
        self.error: BaseException | None = None
        self.trace_state: object = None
        self.thread: threading.Thread | None = None
        self.baton = threading.Semaphore(0)
        self.yielded = threading.Semaphore(0)


@final
class _Round(Merger):
    """One eager `run`."""

    def __init__(
        self,
        strategy: StrategyLike,
        frame: Frame,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: Mapping[str, Nest],
    ) -> None:
        self._strategy = strategy
        self._frame = frame
        # This is done here because a bridge may look up its library's settings for this thread.
        self._fn, self._args, self._kwargs = _bridges.surrounded(fn), args, kwargs
        self._players = [_Player() for _ in strategy.topology.local_replicas]
        self._released = False
        self._failure: BaseException | None = None
        self._raised_together: BaseException | None = None
        self._made = SharedCreations()

    def play(self) -> list[Nest]:
        """Run every replica to its end; return the results."""
        # All replicas get the caller's settings, not those that replica 0 makes in the meantime.
        self._configuration, self._context = thread_configuration(), contextvars.copy_context()
        try:
            for index, player in enumerate(self._players):
                if player.thread is None:
                    self._perform(index)
                else:
                    self._pass_baton(index)
                if player.phase is _Phase.WAITING:
                    self._failure = self._mismatch()
                elif player.phase is _Phase.FAILED and self._failure is None:
                    self._failure = player.error
                if self._failure is not None:
                    raise self._failure
        finally:
            self._release_all()
            self._forget_errors()
        return [player.result for player in self._players]

    def merge(self, local_index: int, meeting: Meeting) -> Nest:
        if self._released or self._failure is not None:
            raise _Released  # such as from a `finally` block: no replica is left to meet
        player = self._players[local_index]
        _require_numbers(meeting, player.trace_state)
        player.meeting, player.phase = meeting, _Phase.WAITING
        with _bridges.suspended():
            if player.thread is None:
                self._meet(local_index)
            else:
                player.yielded.release()
                player.baton.acquire()
                if self._released:
                    raise _Released
        player.meeting, player.phase = None, _Phase.RUNNING
        if player.error is not None:
            error, player.error = player.error, None
            try:
                raise error
            finally:
                del error  # Its traceback holds this frame.
        return player.outcome

    def once(self, local_index: int, label: str, make: Callable[[], Values]) -> Values:
        key = self._made.next_key(local_index)
        if local_index > 0:
            return self._made.find(key, label, self._strategy)
        with _bridges.suspended(), _context.entered(self._frame):
            return self._made.note(key, label, make)

    def _meet(self, index: int) -> None:
        """Bring the other replicas here, then hold the meeting, on the caller's thread."""
        if index != 0:
            self._fail(self._mismatch())  # the replicas before this one have returned
        for other, player in enumerate(self._players[1:], start=1):
            if player.phase is _Phase.NEW:
                self._start(other)
            else:
                self._pass_baton(other)
            if player.phase is _Phase.FAILED and player.error is not None:
                self._fail(player.error)
        meetings = [player.meeting for player in self._players if player.meeting is not None]
        if len(meetings) < len(self._players) or not all(
            meeting.agrees_with(meetings[0]) for meeting in meetings
        ):
            self._fail(self._mismatch())
        try:
            outcomes = self._resolve(meetings)
        except Exception as error:
            error.add_note(
                f"Raised where the replicas of {self._strategy!r} met for {meetings[0].label}."
            )
            # All replicas get the error, so that one that handles it does not leave others behind.
            self._raised_together = error
            for player in self._players:
                player.error = error
        else:
            for player, outcome in zip(self._players, outcomes, strict=True):
                player.outcome = outcome

    def _fail(self, error: BaseException) -> NoReturn:
        """End the round with `error`, even if the replica on this thread catches it."""
        self._failure = error
        raise _Released

    def _resolve(self, meetings: Sequence[Meeting]) -> list[Nest]:
        topology, first = self._strategy.topology, meetings[0]
        args, kwargs = regroup(
            [meeting.arguments for meeting in meetings], topology, always_wrap=first.always_wrap
        )
        with _context.entered(self._frame):
            result = first.fn(self._strategy, *args, **kwargs)
        require_own_values(result, topology, first.label)
        return [select(result, index, topology) for index in range(len(self._players))]

    def _perform(self, index: int) -> None:
        """Run one replica on this thread, until it ends."""
        player = self._players[index]
        topology = self._strategy.topology
        replica_id = topology.local_replicas[index]
        devices = topology.devices[replica_id]
        context = ReplicaContext(
            self._strategy,
            self,
            replica_id,
            index,
            topology.num_replicas,
            devices,
            row_weight=lambda: self._row_weights[replica_id],
        )
        frame = replace(self._frame, kind=ContextKind.REPLICA, replica=context)
        player.phase = _Phase.RUNNING
        player.trace_state = get_opaque_trace_state()
        try:
            with _context.entered(frame), jax.default_device(devices[0]):
                args = select(tuple(self._args), index, topology, keep_opaque=True)
                kwargs = select(dict(self._kwargs), index, topology, keep_opaque=True)
                player.result = self._fn(*args, **kwargs)
            player.phase = _Phase.RETURNED
        except BaseException as error:
            player.error, player.phase = error, _Phase.FAILED
            add_recipe(error)
            named = error is self._raised_together or isinstance(error, _Released)
            if len(self._players) > 1 and not named:
                error.add_note(f"Raised in replica {replica_id} of {self._strategy!r}.")
                if _has_empty_share((self._args, self._kwargs), index):
                    error.add_note(
                        f"The share of replica {replica_id} has 0 rows, because there were fewer "
                        "rows than replicas. Write the function so that it takes none (sums "
                        "divided by the global batch size, and no means), or leave such batches "
                        "out: `dataset.batch(size, drop_remainder=True)`."
                    )

    @functools.cached_property
    def _row_weights(self) -> list[float]:
        """The weight of each replica's mean in a mean over all rows."""
        arguments = _nest.leaves((self._args, self._kwargs), keep_opaque=True)
        values = [
            leaf for leaf in arguments if isinstance(leaf, PerReplica) and leaf.common is None
        ]
        agree_on_unknown_shapes(values)
        return row_weights([value.shapes for value in values], self._strategy.topology.num_replicas)

    def _start(self, index: int) -> None:
        player = self._players[index]
        context = self._context.copy()

        def body() -> None:
            with self._configuration():
                self._perform(index)
            player.yielded.release()

        player.thread = threading.Thread(
            target=context.run, args=(body,), name=f"replicax-replica-{index}", daemon=True
        )
        player.thread.start()
        self._wait_for(index)

    def _pass_baton(self, index: int) -> None:
        """Resume a waiting replica until it waits again or ends."""
        player = self._players[index]
        if player.phase is _Phase.WAITING:
            player.baton.release()
            self._wait_for(index)

    def _wait_for(self, index: int) -> None:
        """Wait until a replica waits in turn or has ended; warn if that takes long.

        The replica may compute for as long as it likes. But it may also be waiting for a lock that
        replica 0 holds, and then only the user can help.
        """
        player = self._players[index]
        while not player.yielded.acquire(timeout=_LONG):
            first = self._players[0].meeting
            stack = ""
            if player.thread is not None and player.thread.ident in sys._current_frames():
                frame = sys._current_frames()[player.thread.ident]
                stack = "".join(traceback.format_stack(frame, limit=6))
            warnings.warn(
                f"Replica 0 of {self._strategy!r} has waited {_LONG:.0f} s in "
                f"{first.label if first else 'a meeting'} for replica {index}, which is at:\n"
                f"{stack}If that is a lock, replica 0 may hold it: do not hold locks (such as that "
                "of `functools.cached_property`) where replicas meet.",
                RuntimeWarning,
                stacklevel=frames_to_the_user(),
            )

    def _release_all(self) -> None:
        """End the replicas that are still waiting, and their threads."""
        self._released = True
        deadline = time.monotonic() + _PATIENCE
        for index, player in enumerate(self._players):
            if player.thread is None:
                continue
            player.baton.release()
            player.thread.join(timeout=max(0.0, deadline - time.monotonic()))
            if player.thread.is_alive():
                warnings.warn(
                    f"Replica {index} of {self._strategy!r} is still busy {_PATIENCE:.0f} s after "
                    "`run` was given up; its thread is left behind.",
                    RuntimeWarning,
                    stacklevel=frames_to_the_user(),
                )

    def _forget_errors(self) -> None:
        """Drop the raised errors, whose tracebacks hold this round and the caller's variables.

        Otherwise they would stay, batches and all, until the garbage collector runs.
        """
        self._failure = self._raised_together = None
        for player in self._players:
            player.error = None

    def _mismatch(self) -> CollectiveMismatch:
        replicas = self._strategy.topology.local_replicas
        meetings = [player.meeting for player in self._players if player.meeting is not None]
        # If the names are the same, the subjects differ.
        alike = len({meeting.label for meeting in meetings}) == 1 < len(meetings)

        def doing(player: _Player) -> str:
            if player.meeting is None:
                return player.phase.value
            about = f" on {list(player.meeting.subjects)}" if alike else ""
            return f"called {player.meeting.label}{about}"

        states = "; ".join(
            f"replica {replica} {doing(player)}"
            for replica, player in zip(replicas, self._players, strict=True)
        )
        return CollectiveMismatch(
            f"The replicas of {self._strategy!r} do not agree on what to do together: {states}. "
            "Every replica must make the same collective calls, on the same variables, in the "
            "same order; look for a condition that depends on the replica or on its data."
        )


def _has_empty_share(arguments: Nest, index: int) -> bool:
    """Tell whether a replica got no rows while another one got some."""
    values = [
        leaf for leaf in _nest.leaves(arguments, keep_opaque=True) if isinstance(leaf, PerReplica)
    ]
    return any(
        getattr(value.component(index), "shape", ())[:1] == (0,)
        and any(shape[:1] != (0,) for shape in value.known_shapes() or ())
        for value in values
    )


def _require_numbers(meeting: Meeting, trace_state: object) -> None:
    """Refuse a meeting inside `jax.jit` and the like, where arrays have no numbers yet."""
    traced = any(isinstance(leaf, Tracer) for leaf in _nest.leaves(meeting.arguments))
    if not traced and get_opaque_trace_state() != trace_state:
        # A transformation is active. `jax.grad` leaves arrays alone that it does not differentiate;
        # a transformation that traces turns even constants into tracers.
        traced = isinstance(jnp.zeros(()), Tracer)
    if not traced:
        return
    raise MeetingInTrace(
        f"`{meeting.label}` was called inside a JAX transformation (such as `jax.jit`, `jax.vmap` "
        "or, for `merge_call`, `jax.grad`), where the replicas cannot meet. Call it outside of the "
        "transformed function, or have the whole step compiled: `rx.function(step)` instead of "
        "`jax.jit(step)`."
    )
