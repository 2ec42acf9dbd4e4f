"""The session of a worker: how workers come together, agree, and part."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, final

import jax

from replicax import _jax_compat
from replicax.cluster import _starting as starting
from replicax.cluster._abandonable_thread import Result, Runner
from replicax.cluster._forking import hold_until_exit
from replicax.cluster._hub import Hub
from replicax.cluster._hub_service import HubService
from replicax.cluster._joining import bring_together
from replicax.cluster._link import Exchange, Link
from replicax.cluster._members import Members
from replicax.cluster._messages import Failed, Finished, TakeLeave
from replicax.cluster._ports import PortRange, ReservedPort
from replicax.cluster._progress import Progress, Waiting
from replicax.cluster._reach import Reach
from replicax.cluster._starting import NOTICE_SECONDS
from replicax.cluster._uncaught import Uncaught, place_of
from replicax.cluster._watchdog import Watchdog
from replicax.cluster._wire import Wire
from replicax.errors import (
    CollectiveMismatch,
    ProgramMismatch,
    ReplicaxError,
    StartFailed,
    WorkerLost,
)

if TYPE_CHECKING:
    from replicax._typing import Json

DEFAULT_TIMEOUT_SECONDS = 300.0
# How long to wait for the report of a lost worker after a collective has failed.
_NEWS_SECONDS = 10.0
_FAREWELL_SECONDS = 2.0
# How long a worker that failed because of another waits for that one to end, so that the launcher
# sees the cause first.
_CAUSE_SECONDS = 10.0
# The time that each part of the start may take in any case, because machines may be busy.
_LEAST_START_SECONDS = 10.0
_SHOWN = 300  # characters shown of a difference
_LONGEST_LINE = 50_000  # characters of a program's line that are compared to show where it differs

_current: Session | None = None


def session() -> Session | None:
    """Return the session of this process, or None if it is not one of several workers."""
    return _current


def current() -> Session:
    """Return the session of this process; raise if it is not one of several workers."""
    if _current is None:
        raise StartFailed(
            "The devices belong to several processes, and these were not brought together by "
            "replicax. Make an `rx.MultiWorkerMirroredStrategy` first."
        )
    return _current


def join(members: Members, timeout_seconds: float | None) -> Session:
    """Bring this process together with the other workers, once and for as long as it lives."""
    global _current
    if _current is None:
        _current = Session(members, timeout_seconds or DEFAULT_TIMEOUT_SECONDS)
    elif _current.members != members:
        raise StartFailed(
            f"This process is {_current.members.describe(_current.members.index)} of a cluster "
            f"already, and cannot become {members.describe(members.index)} of another one. Use one "
            "cluster in a process."
        )
    elif timeout_seconds is not None and timeout_seconds != _current.timeout_seconds:
        raise StartFailed(
            f"The workers have agreed to wait {_current.timeout_seconds:g} s for each other, and "
            f"cannot change that to {timeout_seconds:g} s. Give the options to the first strategy."
        )
    return _current


class Postponed(Protocol):
    """Values that workers agree on later than they could, in order to agree on many at once."""

    def agree(self) -> None: ...


class Closed(Exception):
    """A prefetching thread was asked to end while it waited."""


@final
class Session:
    """A worker's part in a cluster."""

    def __init__(self, members: Members, timeout_seconds: float) -> None:
        self.members = members
        self.timeout_seconds = timeout_seconds
        self.progress = Progress()
        self._counters: dict[str, int] = {}
        self._postponed: Postponed | None = None
        self._agreeing = threading.RLock()  # re-entrant, because `agree` gathers values too
        self._failed = self._secondary = self._preempted = False
        self._uncaught: Uncaught | None = None  # once the workers have come together
        self._left_behind: str | None = None
        self._process = os.getpid()
        starting.require_fresh_jax()
        starting.require_address(members, 0)
        allowed = PortRange.from_environment()
        deadline = time.monotonic() + timeout_seconds
        self._hub: HubService | None = None
        reserved: ReservedPort | None = None
        if members.index == 0:
            listener = starting.listen(members)
            reserved = ReservedPort(members, allowed)
            self._hub = HubService(Hub(members, str(reserved.address)), listener)
        connection = starting.connect(members, deadline, self._say)
        hold_until_exit(connection)
        self._link = Link(Wire(connection), members)
        self._runner = Runner()
        reach = Reach(members, timeout_seconds)
        self._watchdog = Watchdog(members, self._link, self.progress, timeout_seconds, reach)
        atexit.register(self._leave)  # registered after JAX's own, and so called before it
        try:
            starting.require_address(members, members.index)  # now, so that all get the error
            coordinator = self._welcomed(deadline)
            bring_together(
                members, coordinator, reserved, allowed, reach, self.all_gather, self._start
            )
        except BaseException as error:
            self._say_farewell(error)
            self._watchdog.close()
            # At exit, a worker that failed because of another learns from its hub when that one
            # ends.
            if self._hub is not None and not self._secondary:
                self._hub.close()
            raise
        finally:
            if reserved is not None:
                reserved.close()
        self._uncaught = Uncaught(self.progress, self._say_farewell)

    # Working together.

    def number(self, kind: str) -> int:
        """Count things of one kind: the n-th is the same thing on all workers."""
        self._counters[kind] = self._counters.get(kind, -1) + 1
        return self._counters[kind]

    def all_gather(self, label: str, value: object = None) -> list[Json]:
        """Return the values that all workers give for `label`, in worker order.

        Raises `CollectiveMismatch` on all workers if they have come for different things.
        """
        self.catch_up()
        topic = f"all_gather/{self.number('all_gather')}"
        with self.progress.together(label, topic) as waiting:
            self._require_all(waiting)
            brought = self._link.exchange(
                topic,
                label,
                {"label": label, "value": value},
                lambda: self._check(waiting),
            )
        labels = [item["label"] for item in brought]
        if len(set(labels)) > 1:
            raise CollectiveMismatch(
                "The workers do not agree on what to do together: "
                f"{self._side_by_side([f'came for {each}' for each in labels])}. Every worker "
                "must do the same, in the same order; look for a condition that depends on the "
                "worker or on its data."
            )
        return [item["value"] for item in brought]

    def postponed(self, make: Callable[[], Postponed]) -> Any:
        """Return the values to agree on before the next collective, making them if need be."""
        if self._postponed is None:
            self._postponed = make()
        return self._postponed

    def catch_up(self) -> None:
        """Agree on postponed values.

        Everything that waits for other workers does this first, because another worker may already
        be waiting for that agreement: one that has read a variable, for example.
        """
        with self._agreeing:
            postponed, self._postponed = self._postponed, None  # because `agree` calls this too
            try:
                if postponed is not None:
                    postponed.agree()
            except BaseException:
                self._postponed = postponed  # part of it may remain
                raise

    def agree_on_program(self, label: str, facts: dict[str, str], text: str) -> None:
        """Make sure that all workers are about to run the same program.

        `facts` are compared one by one; `text`, which may be long, by its fingerprint first.
        """
        fingerprint = hashlib.sha256(text.encode()).hexdigest()
        everyones = self.all_gather(label, {**facts, "programs": fingerprint})
        for aspect in (*facts, "programs"):
            if len({each.get(aspect) for each in everyones}) == 1:
                continue
            sides = [each.get(aspect, "") for each in everyones]
            if aspect == "programs":
                sides = self._compare_lines(label, text)
            raise ProgramMismatch(
                f"The workers are about to run {label}, and their {aspect} differ: "
                f"{self._side_by_side(_first_difference(sides))}. Run the same code on the same "
                "shapes on every worker; look for a condition that depends on the worker, or for "
                "shapes that depend on its data."
            )

    def _compare_lines(self, label: str, text: str) -> list[str]:
        """Return each worker's version of the first line of `text` that is not the same for all."""
        lines = text.splitlines()
        digests = self.all_gather(
            f"comparing {label}", [zlib.crc32(line.encode()) for line in lines]
        )
        rows = itertools.zip_longest(*digests)
        place = next(place for place, row in enumerate(rows) if len(set(row)) > 1)
        own = lines[place][:_LONGEST_LINE] if place < len(lines) else ""
        return self.all_gather(f"showing line {place} of {label}", own)

    def has_ended(self, worker: int) -> bool:
        """Return whether it is known that a worker takes no part any more."""
        return worker in self._link.ended

    def put_input(self, topic: str, value: object) -> Exchange:
        """Publish a value to all workers, without waiting for theirs; for prefetching threads."""
        return self._link.put(topic, "the input of a step", value)

    def wait_for_input(self, exchange: Exchange, closed: threading.Event) -> list[Json]:
        """Return all workers' values, or raise `Closed`; for prefetching threads."""

        def check() -> None:
            if closed.is_set():
                raise Closed
            waiting = self.progress.waiting
            if waiting is not None and waiting.topic == exchange.topic:
                self._check(waiting)

        with self.progress.for_input(exchange.topic):
            return exchange.wait(check)

    def run(self, label: str, program: Callable[[], Result]) -> Result:
        """Run a program that all workers run; an error names the worker to blame.

        Call `catch_up` first, before taking any lock that programs need.
        """
        return self._run(label, program, self._check)

    def _run(
        self, label: str, program: Callable[[], Result], check: Callable[[Waiting], None]
    ) -> Result:
        with self.progress.together(label) as waiting:
            try:
                self._require_all(waiting)
                return self._runner.run(program, lambda: check(waiting))
            except BaseException as error:
                if self._runner.busy:  # it continues, and this worker ignores its results
                    self._left_behind = label
                if isinstance(error, ReplicaxError) or "gloo" not in str(error).lower():
                    raise
                if self._link.wait_for_loss(_NEWS_SECONDS) is None:
                    self._watchdog.look_around(waiting, error)
                    raise
                self._watchdog.raise_loss(label, list(self._link.ended), error)

    def _check(self, waiting: Waiting) -> None:
        """Raise `WorkerLost` if the wait is hopeless; report periodically that it continues."""
        if self._watchdog.check(waiting):
            self._say(
                f"has waited {time.monotonic() - waiting.since:.0f} s in {waiting.label} "
                f"(collective {self.progress.number}), as all workers have, and waits on"
            )

    def _require_all(self, waiting: Waiting) -> None:
        """Raise `WorkerLost` if this worker, or one that it needs, can no longer take part."""
        if self._left_behind is not None:
            raise WorkerLost(
                f"{self.members.name} was interrupted in {self._left_behind}, which the other "
                "workers may have completed: its variables need not be theirs any more, so that it "
                f"cannot take part in {waiting.label}. Start again from what was saved."
            )
        self._watchdog.require_all(waiting)

    # Preemption.

    def preempt(self) -> None:
        """Ask all workers to stop."""
        if not self._preempted:
            self._preempted = True
            self._link.agreed_stop.request()

    def stop_requested(self) -> bool:
        """Return whether all workers stop at this question; see `rx.preemption.requested`."""
        with self.progress.together("asking whether to stop") as waiting:
            return self._link.agreed_stop.asked(lambda: self._check(waiting))

    # Coming together.

    def _start(self, label: str, program: Callable[[], object]) -> None:
        """Run a part of the start that waits for all workers, for at most `timeout_seconds`."""

        def check(waiting: Waiting) -> None:
            well = self._watchdog.check(waiting)
            seconds = time.monotonic() - waiting.since
            if well and seconds > _LEAST_START_SECONDS:
                raise StartFailed(
                    f"{self.members.name} has waited {seconds:.0f} s in {label}. No worker is to "
                    "blame: all are in it, and reach each other. If it may take that long, raise "
                    "`timeout_seconds` of the `rx.experimental.CommunicationOptions` given to the "
                    "strategy."
                )

        try:
            self._run(label, program, check)
        except ReplicaxError:
            raise
        except Exception as error:
            raise StartFailed(
                f"{self.members.name} failed in {label}: {type(error).__name__}: {error}"
            ) from error

    def _welcomed(self, deadline: float) -> str:
        notified, turned_away = False, None
        while True:
            left = max(0.0, deadline - time.monotonic())
            coordinator = self._link.wait_for_welcome(min(left, NOTICE_SECONDS), turned_away)
            if coordinator is not None:
                return coordinator
            if turned_away is None and self._link.turned_away is not None:
                # The process turned away was most likely the missing worker. If not, that one
                # should come about now.
                turned_away = self._link.turned_away
                deadline = min(deadline, time.monotonic() + NOTICE_SECONDS)
                self._say(f"waits for others. {turned_away}".removesuffix("."))
                continue
            state = self._link.state(NOTICE_SECONDS)
            absent = [0] if state is None else state.absent
            missing = " and ".join(self.members.describe(worker) for worker in absent)
            if time.monotonic() > deadline and turned_away is not None:
                raise StartFailed(
                    f"The workers cannot come together. {turned_away} {self.members.name} still "
                    f"waits for {missing}."
                )
            if time.monotonic() > deadline:
                raise StartFailed(
                    f"Not all workers have come within {self.timeout_seconds:.0f} s. "
                    f"{self.members.name} still waits for {missing}. Start as many processes as "
                    "the cluster names, each with its own task index."
                )
            if not notified:
                notified = True
                self._say(f"waits for {missing} to start")

    # Leaving.

    def _say_farewell(self, error: BaseException, where: str = "") -> None:
        """Tell the others that the program has failed, and with which error."""
        lost = isinstance(error, WorkerLost) and self._link.lost is not None
        summary = f"{type(error).__name__}: {error}".splitlines()[0][:2000].removesuffix(".")
        reason = f"failed: {summary}{where or place_of(error)}"
        follows = isinstance(error, ReplicaxError) and error.follows_another
        self._fail(reason, secondary=lost or follows)

    def _fail(self, reason: str, secondary: bool) -> None:
        """Tell the others why this worker ends, without waiting for them."""
        self._failed, self._secondary = True, secondary
        self._link.say_farewell(Failed(reason, secondary), _FAREWELL_SECONDS)

    def _leave(self) -> None:
        """Part from the others at exit; the first worker leaves last, as it runs JAX's service."""
        if os.getpid() != self._process:  # a forked child, which is not a worker
            _jax_compat.abandon_distributed_runtime()
            return
        interrupted = False
        failure = None if self._uncaught is None else self._uncaught.unnoticed()
        try:
            if failure is not None:
                self._say_farewell(failure[0])
            elif self._runner.busy and not self._failed:
                lost = self._link.lost is not None
                self._fail(f"has ended in the middle of {self._left_behind}", secondary=lost)
            self._take_leave()
            if self._secondary or self._link.ended_after_loss:
                self._link.wait_until_cause_is_gone(_CAUSE_SECONDS)
        except KeyboardInterrupt as error:
            interrupted = True
            self._say_farewell(error, " (while it waited for others to finish)")
            _jax_compat.abandon_distributed_runtime()
        self._watchdog.close()
        if self._hub is not None:
            self._hub.close()
        if interrupted:
            self._end_at_once(130, "it was interrupted")
        if self._runner.busy:
            # A program may be waiting in XLA for a lost worker. JAX would wait for that program,
            # and the thread that runs it would abort the process once the interpreter has ended.
            self._end_at_once(1, "it left a program behind")
        if failure is not None and failure[1] is not threading.main_thread():
            # Python would exit as if nothing had gone wrong.
            self._end_at_once(1, f"its thread {failure[1].name!r} failed")

    def _end_at_once(self, code: int, reason: str) -> NoReturn:
        self._say(f"ends with exit code {code}: {reason}")
        sys.stdout.flush()
        os._exit(code)

    def _take_leave(self) -> None:
        others = set(range(self.members.count)) - {self.members.index}
        if not self._failed:
            with contextlib.suppress(Exception):  # another worker failed, and reports it itself
                self.catch_up()
        if self._failed or not self._finish_with(others):
            _jax_compat.abandon_distributed_runtime()
            return
        if self.members.index == 0:
            self._link.wait_until_left(others, _NEWS_SECONDS)
        jax.distributed.shutdown()
        self._link.send(TakeLeave())

    def _finish_with(self, others: set[int]) -> bool:
        """Wait until all have finished; return False if one of them is lost.

        They may take as long as they like, provided that they are alive.
        """
        self._link.say_farewell(Finished(self.progress.number), _FAREWELL_SECONDS)
        notified = False
        while not self._link.wait_until_ended(others, NOTICE_SECONDS):
            state = self._link.state(NOTICE_SECONDS)
            if state is None:
                silent = time.monotonic() - self._link.heard
            else:
                silent = max(worker.silent for worker in state.workers)
            if silent > self.timeout_seconds:
                self._say("has finished, and does not wait any longer for workers that are silent")
                return False
            late = sorted(others - self._link.ended.keys())
            if late and not notified:
                notified = True
                names = ", ".join(self.members.describe(worker) for worker in late)
                self._say(f"has finished, and waits for {names}")
        return self._link.all_finished

    def _say(self, text: str) -> None:
        print(f"replicax: {self.members.name} {text}.", file=sys.stderr, flush=True)

    def _side_by_side(self, texts: list[str]) -> str:
        """Return each worker's answer; workers with the same answer are named together."""
        groups: dict[str, list[str]] = {}
        for name, text in zip(self.members.names, texts, strict=True):
            groups.setdefault(text, []).append(name)
        return "; ".join(f"{', '.join(names)} {text}" for text, names in groups.items())


def _first_difference(texts: list[str]) -> list[str]:
    """Return an excerpt of each text from around the first place where they differ."""
    rows = itertools.zip_longest(*(text.splitlines() for text in texts), fillvalue="")
    lines = next((row for row in rows if len(set(row)) > 1), None)
    if lines is None:
        return [f"has a line of more than {_LONGEST_LINE} characters that differs"] * len(texts)
    columns = itertools.zip_longest(*lines)
    place = next(place for place, column in enumerate(columns) if len(set(column)) > 1)
    start = max(0, place - _SHOWN // 2)
    return [f"has {line[start : start + _SHOWN].strip()!r}" for line in lines]
