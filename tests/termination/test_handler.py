"""A program that is told to end saves, ends, and goes on as if nothing had happened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small_training import Training

import replicax as rx
from replicax.termination import _handler as handling
from replicax.termination import _watching as watching

Config = rx.experimental.TerminationConfig
Handler = rx.experimental.PreemptionCheckpointHandler

STEPS, STOP_AFTER = 6, 3


class Ended(Exception):
    """In the place of the end of the process."""


def end() -> None:
    raise Ended


@pytest.fixture
def told(monkeypatch) -> Callable[[], bool]:
    """Says that the machine is taken away, from the moment in which `now()` was called."""
    monkeypatch.setattr(watching, "_POLL_SECONDS", 0.01)
    event = threading.Event()

    def is_told() -> bool:
        return event.is_set()

    def now() -> None:
        event.set()
        for thread in threading.enumerate():
            if thread.name == "replicax-termination":
                thread.join(20)

    is_told.now = now  # type: ignore[attr-defined]
    return is_told


def resumes(strategy: rx.Strategy, directory: Path, told, way: str, compiled: bool) -> None:
    """Trains undisturbed, and again with an end after some steps; both must be equal."""
    undisturbed = Training(strategy, compiled=compiled)
    undisturbed.steps(STEPS)

    def attempt(seed: float, disturbed: bool) -> Training:
        training = Training(strategy, seed=seed, compiled=compiled)
        manager = rx.CheckpointManager(training.checkpoint, directory, asynchronous=True)
        watcher = told if disturbed else None
        handler = Handler(
            strategy.cluster_resolver,
            manager,
            termination_config=Config(termination_watcher_fn=watcher, exit_fn=end),
        )
        while training.checkpoint.steps < STEPS:
            if disturbed and training.checkpoint.steps == STOP_AFTER - 1:
                told.now()
            if way == "run":
                handler.run(training.steps, count=1)
                assert handler.total_run_calls == training.checkpoint.steps
            elif way == "scope":
                with handler.watch_preemption_scope():
                    training.steps(1)
            else:
                training.steps(1)
                handler.save_checkpoint_if_preempted()
        return training

    with pytest.raises(Ended):
        attempt(0.0, disturbed=True)
    assert [path.name for path in directory.iterdir()] == ["ckpt-1"]
    resumed = attempt(7.0, disturbed=False)
    assert resumed.state() == undisturbed.state()
    for each in (undisturbed, resumed):
        each.iterator.close()


@pytest.mark.one_process  # among workers, all stop at every question from then on
def test_a_run_that_is_ended_goes_on_bit_for_bit(tmp_path, strategy, execution, told):
    resumes(strategy, tmp_path, told, "run", execution == "compiled")


@pytest.mark.parametrize("way", ["scope", "call"])
def test_loops_that_are_not_calls_of_one_function(tmp_path, two, told, way):
    resumes(two, tmp_path, told, way, compiled=True)


def test_nothing_happens_to_those_who_are_not_told(tmp_path, strategy):
    training = Training(strategy)
    handler = Handler(strategy.cluster_resolver, training.checkpoint, tmp_path / "run")
    assert [handler.run(lambda x: x + 1, x) for x in range(3)] == [1, 2, 3]
    assert handler.total_run_calls == 3
    handler.save_checkpoint_if_preempted()
    with handler.watch_preemption_scope():
        training.steps(1)
    assert not (tmp_path / "run").exists()
    training.iterator.close()


def test_calls_are_counted_across_runs(tmp_path):
    checkpoint = rx.Checkpoint(n=1)
    handler = Handler(None, checkpoint, tmp_path)
    for _ in range(3):
        handler.run(lambda: None)
    rx.CheckpointManager(checkpoint, tmp_path).save()
    handler.run(lambda: None)
    again = Handler(None, rx.Checkpoint(n=0), tmp_path)
    assert (handler.total_run_calls, again.total_run_calls) == (4, 3)
    # A call that fails is none.
    with pytest.raises(ArithmeticError):
        again.run(lambda: 1 / 0)
    with pytest.raises(ArithmeticError), again.watch_preemption_scope():
        _ = 1 / 0
    assert again.total_run_calls == 3


def handler_told_at(at: float | None, checkpoint, directory: Path | None, monkeypatch, **options):
    clock = [100.0]
    monkeypatch.setattr(handling, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    config = Config(termination_watcher_fn=lambda: False, **options)
    handler = Handler(None, checkpoint, directory, config)
    handler._told_at = lambda: at
    return handler, clock


def test_training_goes_on_until_the_grace_period_is_over(tmp_path, monkeypatch):
    checkpoint = rx.Checkpoint(n=0)
    handler, clock = handler_told_at(
        100.0, checkpoint, tmp_path, monkeypatch, grace_period=30, exit_fn=end
    )

    def step():
        checkpoint.n += 1
        clock[0] += 10.0

    handler.run(step)
    handler.run(step)
    with pytest.raises(Ended):
        handler.run(step)
    again = rx.Checkpoint(n=0)
    assert Handler(None, again, tmp_path).total_run_calls == again.n == 3


def test_the_default_is_to_exit_with_a_code_that_is_worth_a_restart(tmp_path, monkeypatch, capsys):
    handler, _ = handler_told_at(1.0, rx.Checkpoint(n=0), tmp_path, monkeypatch)
    with pytest.raises(SystemExit) as raised:
        handler.run(lambda: None)
    assert raised.value.code == 143
    assert f"a worker was told to end; {tmp_path}/ckpt-1 was saved" in capsys.readouterr().err


def test_an_end_that_does_not_end_is_asked_for_once(tmp_path, monkeypatch):
    ended = []
    handler, _ = handler_told_at(
        1.0, rx.Checkpoint(n=0), tmp_path, monkeypatch, exit_fn=lambda: ended.append(1)
    )
    assert [handler.run(lambda: 5) for _ in range(3)] == [5, 5, 5]
    assert ended == [1]
    assert len(list(tmp_path.iterdir())) == 1


def test_a_function_of_ones_own_saves(tmp_path, monkeypatch):
    saved = []
    handler, _ = handler_told_at(
        1.0,
        rx.Checkpoint(n=0),
        None,
        monkeypatch,
        exit_fn=end,
        save_fn=lambda *args, **kwargs: saved.append((args, kwargs)),
    )
    with pytest.raises(Ended):
        handler.save_checkpoint_if_preempted("here", tag=1)
    assert saved == [(("here",), {"tag": 1})]


def test_the_manager_saves_though_its_interval_is_not_over(tmp_path, monkeypatch):
    step = rx.Variable(0)
    manager = rx.CheckpointManager(
        rx.Checkpoint(step=step), tmp_path, None, step_counter=step, checkpoint_interval=100
    )
    manager.save()
    handler, _ = handler_told_at(1.0, manager, None, monkeypatch, exit_fn=end)
    with pytest.raises(Ended):
        handler.run(lambda: step.assign_add(1))
    handler, _ = handler_told_at(1.0, manager, None, monkeypatch, exit_fn=end)
    with pytest.raises(Ended):
        handler.save_checkpoint_if_preempted(checkpoint_number=9)
    assert [Path(path).name for path in manager.checkpoints] == ["ckpt-1", "ckpt-2", "ckpt-9"]


def test_a_save_that_failed_is_tried_again(tmp_path, monkeypatch):
    tries = []

    def save():
        tries.append(1)
        if len(tries) == 1:
            raise OSError("the disk is full")

    handler, _ = handler_told_at(
        1.0, rx.Checkpoint(n=0), None, monkeypatch, exit_fn=end, save_fn=save
    )
    with pytest.raises(OSError, match="the disk is full"):
        handler.run(lambda: None)
    with pytest.raises(Ended):
        handler.run(lambda: None)


def test_a_watcher_that_fails_is_no_silence(tmp_path, told):
    def fail() -> bool:
        raise ConnectionError("no metadata server")

    handler = Handler(
        None, rx.Checkpoint(n=0), tmp_path, Config(termination_watcher_fn=fail, exit_fn=end)
    )
    told.now()  # type: ignore[attr-defined]
    with pytest.raises(ConnectionError, match="no metadata server"):
        handler.run(lambda: None)


def test_a_watcher_ends_with_its_handler(tmp_path, told):
    handler = Handler(None, rx.Checkpoint(n=0), tmp_path, Config(termination_watcher_fn=told))
    (thread,) = (t for t in threading.enumerate() if t.name == "replicax-termination")
    del handler
    thread.join(20)
    assert not thread.is_alive()


def test_arguments_that_mean_nothing(tmp_path, two):
    checkpoint = rx.Checkpoint(n=np.zeros(2))
    manager = rx.CheckpointManager(checkpoint, tmp_path)
    with pytest.raises(rx.errors.InvalidType, match=r"saves an `rx\.Checkpoint` or an"):
        Handler(None, tmp_path, checkpoint)  # type: ignore[arg-type]
    with pytest.raises(rx.errors.InvalidArgument, match="needs a `checkpoint_dir`"):
        Handler(None, checkpoint)
    with pytest.raises(rx.errors.InvalidArgument, match="with a manager, which saves to"):
        Handler(None, manager, tmp_path)
    with pytest.raises(rx.errors.InvalidType, match="`cluster_resolver` must be one of"):
        Handler("local", checkpoint, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(rx.errors.InvalidType, match="`termination_config` must be"):
        Handler(None, manager, termination_config=3)  # type: ignore[arg-type]
    workers = rx.cluster_resolver.SimpleClusterResolver(
        rx.ClusterSpec({"worker": ["localhost:1", "localhost:2"]}), task_type="worker", task_id=0
    )
    with pytest.raises(rx.errors.ContextError, match="2 workers, and this process has not met"):
        Handler(workers, manager)
    handler = Handler(None, manager)
    with pytest.raises(rx.errors.InvalidType, match="must be a function; got 3"):
        handler.run(3)  # type: ignore[arg-type]
    with pytest.raises(rx.errors.ContextError, match="outside the function given to `run`"):
        two.run(lambda: handler.run(lambda: None))
    with pytest.raises(rx.errors.InvalidArgument, match=r"`grace_period` must be .* got -1"):
        Config(grace_period=-1)
    for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
        with pytest.raises(rx.errors.InvalidType, match=f"`{name}` must be a function; got 'x'"):
            Config(**{name: "x"})
