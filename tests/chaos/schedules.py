"""The faults of a trial: frozen values, drawn from a seed and the trial's number."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from chaos.damage import DAMAGES, FORGED, Damage

# Where in the training program something can happen, in the order in which a worker gets there.
PHASES = (
    "start",  # before the workers have come together
    "created",  # the strategy and the variables exist, nothing has been restored
    "tracing",  # in the Python of the step, which runs while it is compiled
    "step",  # before a step
    "in step",  # some milliseconds after a step has begun, from another thread
    "input",  # in the pipeline, which a thread reads ahead of the steps
    "before save",
    "in save",  # everything is written, and about to get its name; in the thread that writes
    "after save",
    "end",  # the results are printed; no worker needs another one any more
)
# Python raises `SystemExit` and other exceptions only where a thread's own code runs.
_PASSIVE = ("SIGKILL", "SIGTERM", "os._exit")
_ACTIVE = ("raise", "sys.exit", "slow", *_PASSIVE)
# A stopped worker is noticed by those that need it. At the end nobody does.
KINDS: dict[str, tuple[str, ...]] = {
    "start": (*_ACTIVE, "SIGSTOP"),
    "created": (*_ACTIVE, "SIGSTOP"),
    "tracing": ("raise", "sys.exit", "slow", "SIGKILL", "os._exit"),
    "step": (*_ACTIVE, "SIGSTOP", "full disk"),
    "in step": (*_PASSIVE, "SIGSTOP"),
    "input": (*_PASSIVE, "raise", "slow", "SIGSTOP"),
    "before save": (*_ACTIVE, "full disk"),
    "in save": (*_PASSIVE, "raise", "slow", "SIGSTOP"),
    "after save": (*_ACTIVE, "full disk"),
    "end": _ACTIVE,
}
# What was forged may be restored, so that a training would end otherwise.
ACCIDENTS = tuple(kind for kind in DAMAGES if kind != FORGED)
LAUNCHER_KINDS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "pause")


@dataclass(frozen=True)
class Event:
    """Something that happens once.

    Args:
      kind: What: a key of `KINDS`, or one of `LAUNCHER_KINDS`.
      phase: Where in the program.
      worker: To which worker; if it happens to the launcher, which worker sees to it.
      at: After which part of all steps, from 0 to 1; of the rows, if it is in the input.
      launcher: Whether it happens to the launcher.
      seconds: For how long, or after how long, where that matters.
      code: The exit code of a program that exits.
      free_bytes: How large files may still get on a full disk.
      recovers: Whether the program goes on after a save has failed, and the next one succeeds.
    """

    kind: str
    phase: str
    worker: int
    at: float = 0.0
    launcher: bool = False
    seconds: float = 0.0
    code: int = 0
    free_bytes: int = 0
    recovers: bool = False

    @property
    def title(self) -> str:
        return f"{'launcher' if self.launcher else 'worker'}: {self.kind}"

    @property
    def breaks_save(self) -> bool:
        """True if a checkpoint cannot be written, if the worker writes one."""
        return self.kind == "full disk" or (self.kind == "raise" and self.phase == "in save")

    @property
    def is_missed(self) -> bool:
        """True if the worker has not failed, but is not there when others need it."""
        return self.kind == "SIGSTOP" or ("exit" in self.kind and self.code == 0)

    @property
    def harmless(self) -> bool:
        """True if the training comes to its end all the same."""
        if self.kind in ("slow", "pause"):
            return True
        if self.breaks_save:
            return self.worker != 0 or self.recovers  # worker 0 writes
        # At the end nobody needs anybody, and SIGTERM finds no step to stop after.
        ended = self.phase == "end" and not self.launcher
        return ended and (self.kind == "SIGTERM" or self.is_missed)

    def __str__(self) -> str:
        whom = "the launcher" if self.launcher else f"worker {self.worker}"
        what = f"{self.kind}({self.code})" if "exit" in self.kind else self.kind
        when = "" if self.phase in ("start", "created", "end") else f" after {self.at:.0%}"
        return f"{whom}: {what}, {self.phase}{when}"


@dataclass(frozen=True)
class Input:
    """The training data of a trial.

    Args:
      rows: How many; each is to be seen once per epoch.
      batch: How many of them make a global batch; one of a replica, with "function".
      epochs: How many times.
      policy: How workers share them: an `rx.AutoShardPolicy`, or "function".
    """

    rows: int
    batch: int
    epochs: int
    policy: str


# Few, because each needs an undisturbed run to compare with.
INPUTS = (
    Input(rows=20, batch=5, epochs=4, policy="DATA"),
    Input(rows=13, batch=3, epochs=1, policy="OFF"),
    Input(rows=19, batch=2, epochs=3, policy="function"),
)


@dataclass(frozen=True)
class Round:
    """One start of the launcher.

    Args:
      events: What happens, one event per attempt of the launcher.
      restarts: How many times the launcher starts the workers again.
      damage: What is done to the latest checkpoint before.
    """

    events: tuple[Event, ...]
    restarts: int
    damage: Damage | None = None


@dataclass(frozen=True)
class Training:
    """Workers that train, to whom something happens, and who resume until they have finished."""

    workers: int
    devices: int
    input: Input
    interval: int
    max_to_keep: int
    asynchronous: bool
    rounds: tuple[Round, ...]

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(event for each in self.rounds for event in each.events)

    @property
    def undisturbed(self) -> Training:
        """The same training, without anything that must not matter in the end."""
        return Training(self.workers, self.devices, self.input, 4, 2, False, ())


@dataclass(frozen=True)
class Restoring:
    """Checkpoints that are damaged, and restored in one process."""

    damages: tuple[Damage, ...]


@dataclass(frozen=True)
class Feeding:
    """A dataset that several workers share, each of them resumed at every position."""

    rows: int
    batch: int
    workers: int
    replicas: int  # of each worker
    policy: str
    partial_batches: str


@dataclass(frozen=True)
class Iterating:
    """Iterators of the public interface, resumed at some positions, also by other replicas."""

    source: str
    rows: int
    batch: int
    epochs: int
    shuffled: bool
    replicas: tuple[int, ...]  # of one strategy after another
    steps: tuple[int, ...]  # of each of them, before the next one resumes


Plan = Training | Restoring | Feeding | Iterating


def draw(seed: int, number: int) -> Plan:
    """Return what happens in the trial of that number."""
    chance = random.Random(f"{seed}/{number}")
    kinds: list[Callable[[random.Random], Plan]] = [training, restoring, feeding, iterating]
    (kind,) = chance.choices(kinds, [4, 1, 2, 1])
    return kind(chance)


def training(chance: random.Random) -> Training:
    workers = chance.choice([2, 2, 3])
    count = chance.choice([1, 2, 2, 3])
    # After one that is harmless no attempt follows for another one.
    events = sorted((event(chance, workers) for _ in range(count)), key=lambda each: each.harmless)
    times = sorted(chance.random() for _ in events)
    events = [dataclasses.replace(each, at=at) for each, at in zip(events, times, strict=True)]
    rounds: list[Round] = []
    while events:
        # A launcher that was told to end starts nobody again.
        until = next((i for i, each in enumerate(events, 1) if each.launcher), len(events))
        count = chance.randint(1, until)
        damage = draw_damage(chance, ACCIDENTS) if rounds and chance.random() < 0.4 else None
        rounds.append(Round(tuple(events[:count]), count - chance.randint(0, 1), damage))
        events = events[count:]
    return Training(
        workers,
        devices=chance.choice([1, 1, 2]) if workers == 2 else 1,
        input=chance.choice(INPUTS),
        interval=chance.randint(1, 4),
        max_to_keep=chance.randint(1, 3),
        asynchronous=chance.random() < 0.6,
        rounds=tuple(rounds),
    )


def event(chance: random.Random, workers: int) -> Event:
    if chance.random() < 0.2:
        phase = chance.choice(["created", "step", "in step", "before save", "after save", "end"])
        kind = chance.choice(LAUNCHER_KINDS)
        return Event(kind, phase, chance.randrange(workers), launcher=True, seconds=1.0)
    phase = chance.choice(PHASES)
    kind = chance.choice(KINDS[phase])
    if kind == "SIGSTOP" and chance.random() < 0.5:  # half as often: it takes the time-out
        kind = chance.choice(KINDS[phase])
    return Event(
        kind,
        phase,
        # Worker 0 writes the checkpoints.
        0 if phase == "in save" or (kind == "full disk" and chance.random() < 0.7)
        else chance.randrange(workers),
        seconds=chance.uniform(0.0, 0.03) if phase == "in step" else chance.uniform(0.5, 3.0),
        code=chance.choice([0, 1, 3, 77]),
        free_bytes=chance.choice([0, 10, 100]),  # some file of a checkpoint is larger
        recovers=chance.random() < 0.5,
    )  # fmt: skip


def restoring(chance: random.Random) -> Restoring:
    return Restoring(tuple(draw_damage(chance, DAMAGES) for _ in range(12)))


def draw_damage(chance: random.Random, kinds: Iterable[str]) -> Damage:
    return Damage(chance.choice(list(kinds)), chance.random(), chance.random())


def feeding(chance: random.Random) -> Feeding:
    workers, replicas, batch = chance.randint(1, 4), chance.randint(1, 3), chance.randint(1, 9)
    return Feeding(
        rows=chance.randint(0, 2 * workers * replicas * batch + 1),
        batch=batch,
        workers=workers,
        replicas=replicas,
        policy=chance.choice(["DATA", "OFF"]),
        partial_batches=chance.choice(["even", "in_order"]),
    )


def iterating(chance: random.Random) -> Iterating:
    batch, count = chance.randint(1, 9), chance.randint(2, 4)
    return Iterating(
        source=chance.choice(["arrays", "grain map", "grain iter", "list", "generator"]),
        rows=chance.randint(0, 40),
        batch=batch,
        epochs=chance.randint(1, 3),
        shuffled=chance.random() < 0.5,
        replicas=tuple(chance.randint(1, 4) for _ in range(count)),
        steps=tuple(chance.randint(0, 5) for _ in range(count - 1)),
    )


def to_json(plan: Training) -> str:
    return json.dumps(dataclasses.asdict(plan))


def training_from_json(text: str) -> Training:
    """Return a training as a worker is told of it, which does not look at damage."""
    fields: dict[str, Any] = json.loads(text)
    rounds = tuple(
        Round(tuple(Event(**event) for event in each["events"]), each["restarts"])
        for each in fields.pop("rounds")
    )
    return Training(input=Input(**fields.pop("input")), rounds=rounds, **fields)
