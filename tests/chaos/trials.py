"""Trials: each carries out a plan, and returns what was tried and what did not hold."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from chaos import schedules
from chaos.damage import FORGED
from chaos.judging import problems
from chaos.launching import launch
from chaos.schedules import Feeding, Iterating, Plan, Restoring, Round, Training
from pipelines import SOURCES
from small_training import Training as SmallTraining

import replicax as rx
from replicax.input._feed import SplittingFeed, Step, first_step
from replicax.input._row_splitting import Workers
from replicax.input._sharding import shard
from replicax.input.sources import source_of

# What a trial in this process may take, in seconds.
_OWN_SECONDS = 120.0
_LONGEST = 3000  # characters that are shown of a problem


@dataclass(frozen=True)
class Tried:
    """One thing that was tried, and what did not hold of what is promised."""

    what: str
    problems: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Trial:
    """A trial that was carried out."""

    seed: int
    number: int
    plan: Plan
    tried: tuple[Tried, ...]

    @property
    def problems(self) -> list[str]:
        return [problem for each in self.tried for problem in each.problems]

    @property
    def again(self) -> str:
        """The command that repeats it."""
        return f"make chaos SEED={self.seed} TRIAL={self.number}"

    def __str__(self) -> str:
        names = ", ".join(dict.fromkeys(each.what for each in self.tried))
        lines = [f"{self.number}: {'FAILED' if self.problems else 'held'}: {names}"]
        if self.problems:
            lines += [f"  {text[:_LONGEST]}" for text in (str(self.plan), *self.problems)]
            lines.append(f"  again: {self.again}")
        return "\n".join(lines)


def run(
    seed: int,
    seconds: float | None = None,
    only: int | None = None,
    kind: type | None = None,
) -> Iterator[Trial]:
    """Carry out one trial after the other, or `only` one, or those of a `kind`.

    After so many seconds no other one begins.
    """
    begun = time.monotonic()
    for number in itertools.count() if only is None else [only]:
        plan = schedules.draw(seed, number)
        if kind is not None and not isinstance(plan, kind):
            continue
        if seconds is not None and time.monotonic() - begun > seconds:
            return
        yield Trial(seed, number, plan, tuple(carry_out(plan)))


def carry_out(plan: Plan) -> list[Tried]:
    """Return what was tried; whatever is raised is something that did not hold."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        try:
            match plan:
                case Training():
                    return train(plan, Path(directory))
                case Restoring():
                    with bounded():
                        return restore(plan, Path(directory))
                case Feeding():
                    with bounded():
                        return feed(plan)
                case Iterating():
                    with bounded():
                        return iterate(plan)
        except (Exception, Overdue):
            return [Tried(f"{type(plan).__name__.lower()}", (traceback.format_exc(),))]


# Workers and the launcher.


@dataclass(frozen=True)
class Results:
    """The final output of the workers of a finished training."""

    steps: tuple[str, ...]
    weights: tuple[str, ...]
    seen: tuple[str, ...]

    @classmethod
    def of(cls, logs: tuple[str, ...]) -> Results:
        return cls(*(
            tuple(found[1] for log in logs if (found := re.search(rf"^{name} (.*)$", log, re.M)))
            for name in ("steps", "weights", "seen")
        ))  # fmt: skip


@functools.cache
def undisturbed(training: Training) -> Results:
    """Return how a training ends that nothing happens to."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory:
        (attempt,) = launch(training, Round((), 0), Path(directory), steps=0)
    results = Results.of(attempt.logs)
    copies = training.workers if training.input.policy == "OFF" else 1
    seen = str([copies * training.input.epochs])
    assert attempt.code == 0, attempt
    assert results.seen == (seen,) * training.workers, attempt
    assert len(set(results.weights)) == 1, attempt
    return results


def train(training: Training, directory: Path) -> list[Tried]:
    """Train with everything that happens, until the training has come to its end."""
    expected = undisturbed(training.undisturbed)
    tried: list[Tried] = []
    # After the last round nothing happens any more.
    for number, each in enumerate([*training.rounds, Round((), 0)]):
        if each.damage is not None:
            tried += damage_latest(training, each, directory / "checkpoints", number, expected)
        attempts = launch(training, each, directory, int(expected.steps[0]), f"round-{number}")
        for attempt in attempts:
            what = "workers: nothing, to the end" if attempt.event is None else attempt.event.title
            wrong = problems(attempt)
            if wrong:
                wrong += attempt.last_lines
            tried.append(Tried(what, tuple(wrong), attempt.seconds))
        if attempts[-1].code == 0:
            break
    results, wrong = Results.of(attempts[-1].logs), list[str]()
    if results != expected:
        wrong.append(f"ended with {results}, undisturbed with {expected}")
    left = sorted(path.name for path in (directory / "checkpoints").iterdir())
    complete = [name for name in left if re.fullmatch(r"ckpt-\d+", name)]
    # What was damaged may not look like a checkpoint any more, and is nobody's to remove then.
    damaged = sum(each.damage is not None for each in training.rounds)
    if left != complete or len(complete) > training.max_to_keep + damaged:
        wrong.append(f"left behind {left}, of which {training.max_to_keep} are to be kept")
    return [*tried, Tried("weights, rows and files at the end", tuple(wrong))]


def damage_latest(
    training: Training, each: Round, checkpoints: Path, number: int, expected: Results
) -> list[Tried]:
    """Damage the latest checkpoint: all workers refuse it, or are where they would be anyway."""
    assert each.damage is not None
    latest = rx.latest_checkpoint(checkpoints)
    if latest is None:
        return []
    each.damage.apply(Path(latest))
    what = "workers: damaged checkpoint"
    # Without events, which are for the attempts after this one.
    (attempt,) = launch(
        dataclasses.replace(training, rounds=()),
        Round((), 0),
        checkpoints.parent,
        int(expected.steps[0]),
        f"damaged-{number}",
    )
    refusals = attempt.said_by_all(r"\breplicax\.errors\.(\w*Checkpoint\w*): ")
    if len(refusals) == training.workers and attempt.code == 1:
        shutil.rmtree(latest)  # as the message says
        return [Tried(what)]
    wrong = problems(attempt)
    if not wrong and Results.of(attempt.logs) != expected:
        wrong.append(f"{each.damage}: was restored, and ended with {Results.of(attempt.logs)}")
    return [Tried(what, tuple(wrong))]


# Checkpoints, in this process.


def restore(plan: Restoring, directory: Path) -> list[Tried]:
    """Damage the latest of two checkpoints in many ways, and restore it."""
    training = SmallTraining(mirrored(2))
    pristine = directory / "pristine"
    manager = rx.CheckpointManager(training.checkpoint, pristine)
    states, paths = [], []
    for _ in range(2):
        training.steps(2)
        paths.append(str(manager.save()))
        states.append(training.state())
    before, after = states
    tried = []
    for number, damage in enumerate(plan.damages):
        damaged = directory / str(number)
        shutil.copytree(pristine, damaged)
        latest = damaged / Path(paths[1]).name
        damage.apply(latest)
        manager = rx.CheckpointManager(training.checkpoint, damaged)
        wrong: list[str] = []
        # A manager does not see what does not look like a checkpoint, and takes the one before.
        for attempt, allowed in (
            (functools.partial(training.checkpoint.restore, latest), [after]),
            (manager.restore_or_initialize, [after, before]),
        ):
            training.checkpoint.restore(paths[0])
            try:
                attempt()
            except rx.errors.ReplicaxError:
                allowed = [before]
            except Exception as error:
                wrong.append(f"{damage}: raised {type(error).__name__}: {str(error)[:300]}")
                allowed = [before]
            else:
                if damage.kind == FORGED:  # something else was restored, and nobody can know
                    continue
            if training.state() not in allowed:
                wrong.append(f"{damage}: left {training.state()} of {before} and {after}")
        tried.append(Tried(f"damage: {damage.kind}", tuple(wrong)))
        shutil.rmtree(damaged)
    training.iterator.close()
    return tried


# Input, in this process.


def feed(plan: Feeding) -> list[Tried]:
    """Read what each of several workers reads, in one go and resumed before every step."""
    dataset = rx.from_tensor_slices(np.arange(plan.rows)).batch(plan.batch)
    policy = rx.AutoShardPolicy[plan.policy]
    rule = rx.InputOptions(partial_batches=plan.partial_batches).partial_batches
    total, wrong = plan.workers * plan.replicas, list[str]()
    read_by_all: Counter[int] = Counter()
    for index in range(plan.workers):
        local = tuple(range(index * plan.replicas, (index + 1) * plan.replicas))
        workers = Workers(total, local, plan.workers, index, rule)
        source, own = shard(source_of(dataset), workers, policy)
        start = functools.partial(SplittingFeed, source, workers, own)
        rows: Counter[int] = Counter()
        state = None
        with contextlib.closing(start()) as whole:
            for position in itertools.count():
                # If the states after each step are equal too, so is all that follows.
                step = first_step(start(state))
                if step is None:
                    break
                resumed, expected = content(step), content(whole.step())
                if resumed != expected:
                    wrong.append(
                        f"{plan}: worker {index}, resumed after {position} steps, reads {resumed} "
                        f"and not {expected}"
                    )
                    break
                parts, state = resumed
                rows.update(itertools.chain.from_iterable(parts))
        read_by_all += rows
        if policy is rx.AutoShardPolicy.OFF and rows != Counter(range(plan.rows)):
            wrong.append(f"{plan}: worker {index} read {rows}")
    if policy is rx.AutoShardPolicy.DATA and read_by_all != Counter(range(plan.rows)):
        wrong.append(f"{plan}: together they read {read_by_all}")
    return [Tried(f"input: {plan.policy}, every position", tuple(wrong))]


def content(step: Step) -> tuple[list[list[int]], Any]:
    """Return the rows of each local replica, and the state after them as a checkpoint has it."""
    (columns,) = step.columns()
    return [rows.tolist() for rows in columns], json.loads(json.dumps(step.state))


def iterate(plan: Iterating) -> list[Tried]:
    """Hand the position of an iterator from one strategy to the next."""
    expected = list(rows_of(plan, plan.replicas[0], None, None)[0])
    found, state = [], None
    for replicas, steps in zip(plan.replicas, [*plan.steps, None], strict=True):
        rows, state = rows_of(plan, replicas, state, steps)
        found += rows
    wrong = []
    if found != expected:
        wrong.append(f"{plan}: read {found}, and {expected} in one go")
    if Counter(found) != Counter(dict.fromkeys(range(plan.rows), plan.epochs)):
        wrong.append(f"{plan}: rows were lost or doubled: {Counter(found)}")
    return [Tried(f"input: {plan.source}, resumed", tuple(wrong))]


def rows_of(plan: Iterating, replicas: int, state: Any, steps: int | None) -> tuple[list[int], Any]:
    """Return the rows of some steps, or of all that are left, and the state after them."""
    strategy = mirrored(replicas)
    if plan.shuffled:
        pipeline = rx.from_tensor_slices(np.arange(plan.rows)).shuffle(seed=plan.rows)
        dataset = pipeline.batch(plan.batch).repeat(plan.epochs)
    else:
        dataset = SOURCES[plan.source](np.tile(np.arange(plan.rows), plan.epochs), plan.batch)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    with contextlib.closing(iterator):
        if state is not None:
            iterator.set_state(state)
        found = []
        for element in iterator if steps is None else itertools.islice(iterator, steps):
            for part in strategy.experimental_local_results(element):
                found += np.asarray(part).tolist()
        return found, json.loads(json.dumps(iterator.get_state()))


def mirrored(replicas: int) -> rx.MirroredStrategy:
    return rx.MirroredStrategy([f"CPU:{index}" for index in range(replicas)])


class Overdue(BaseException):
    """A trial has not ended in time."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Give what runs in this process so much time, and no stderr.

    TensorStore writes a traceback there for each array that it cannot read.
    """

    def give_up(*_: object) -> None:
        raise Overdue(f"had not ended after {_OWN_SECONDS:.0f} s")

    before = signal.signal(signal.SIGALRM, give_up)
    sys.stderr.flush()
    usual = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    signal.setitimer(signal.ITIMER_REAL, _OWN_SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        sys.stderr.flush()
        os.dup2(usual, 2)
        os.close(usual)
