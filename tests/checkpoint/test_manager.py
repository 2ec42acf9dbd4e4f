"""Saving again and again: in the background, the latest few, from where it stood."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import optax
import pytest
from support import equal

import replicax as rx
from replicax import cluster
from replicax.checkpoint import _files as files
from replicax.checkpoint import _writer_thread as writing


def names(manager: rx.CheckpointManager) -> list[str]:
    return [Path(path).name for path in manager.checkpoints]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_latest_are_kept(tmp_path, asynchronous):
    checkpoint = rx.Checkpoint(epoch=0)
    with rx.CheckpointManager(checkpoint, tmp_path, 2, asynchronous=asynchronous) as manager:
        assert manager.restore_or_initialize() is manager.latest is None
        for epoch in range(4):
            checkpoint.epoch = epoch
            assert Path(manager.save() or "").name == f"ckpt-{epoch + 1}"
    assert names(manager) == ["ckpt-3", "ckpt-4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-3", "ckpt-4"]
    assert manager.latest == manager.latest_checkpoint == str(tmp_path / "ckpt-4")

    # Another run goes on, and counts on.
    other = rx.Checkpoint(epoch=0)
    with rx.CheckpointManager(other, tmp_path, None) as manager:
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-4")
        assert (other.epoch, other.save_counter) == (3, 4)
        manager.save()
        manager.sync()
        assert names(manager) == ["ckpt-3", "ckpt-4", "ckpt-5"]
        manager.save(12)
    assert names(manager)[-1] == "ckpt-12"
    with pytest.raises(rx.errors.InvalidArgument, match="there is ckpt-12 in"):
        manager.save(11)


def test_a_save_is_due_after_an_interval(tmp_path, two):
    with two.scope():
        weight, optimizer = rx.Variable(1.0), rx.Optimizer(optax.sgd(0.1))
    checkpoint = rx.Checkpoint(weight=weight, optimizer=optimizer)

    def manage():
        return rx.CheckpointManager(
            checkpoint, tmp_path, step_counter=optimizer.iterations, checkpoint_interval=3
        )

    step = rx.function(lambda: two.run(lambda: optimizer.apply_gradients([(1.0, weight)])))
    with manage() as manager:
        due = []
        for _ in range(7):
            step()
            due.append(manager.save() is not None)
        assert due == [True, False, False, True, False, False, True]
        assert manager.save(check_interval=False) is not None
    with manage() as manager:
        manager.restore_or_initialize()
        assert manager.save() is None


def test_without_a_checkpoint_the_state_is_initialized(tmp_path):
    called = []
    checkpoint = rx.Checkpoint(epoch=0)
    manager = rx.CheckpointManager(checkpoint, tmp_path, init_fn=lambda: called.append(1))
    assert manager.restore_or_initialize() is None
    assert called == [1]
    manager.save()
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert called == [1]
    assert manager.report is not None
    assert manager.report.restored == ("epoch",)


def test_all_objects_have_to_be_in_a_checkpoint_that_is_gone_on_from(tmp_path):
    with rx.CheckpointManager(rx.Checkpoint(a=1), tmp_path) as manager:
        manager.save()
    checkpoint = rx.Checkpoint(a=2, b=3)
    with pytest.raises(rx.errors.CheckpointMismatch, match="It lacks 'b'"):
        rx.CheckpointManager(checkpoint, tmp_path).restore_or_initialize()
    assert checkpoint.a == 2


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """Holds up everything that is written until it is opened."""
    if not writing.IN_BACKGROUND:
        pytest.skip("Python 3.12.0 and 3.12.1 write while `save` waits")
    opened, write = threading.Event(), files.write

    def write_later(*args):
        assert opened.wait(20)
        write(*args)

    monkeypatch.setattr(files, "write", write_later)
    return opened


def test_what_is_saved_is_the_state_of_that_moment(tmp_path, strategy, gate):
    with strategy.scope():
        weight = rx.Variable(np.zeros(1000, np.float32), aggregation="MEAN")
        count = rx.Variable(0, synchronization="ON_READ", aggregation="SUM", dtype=np.int32)

    def replica():
        weight.assign_add(np.ones(1000, np.float32))
        count.assign_add(1)

    step = rx.function(lambda: strategy.run(replica))
    array = np.zeros(3)
    checkpoint = rx.Checkpoint(weight=weight, count=count, array=array)
    with rx.CheckpointManager(checkpoint, tmp_path, asynchronous=True) as manager:
        step()
        path = manager.save()
        assert not Path(path or "").exists()
        for _ in range(5):
            step()
        array += 1.0
        gate.set()
        assert manager.latest == path
    checkpoint.restore(path)
    equal(weight.numpy(), np.ones(1000))
    assert int(count.numpy()) == strategy.num_replicas_in_sync
    equal(checkpoint.array, np.zeros(3))


def test_what_goes_wrong_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch):
    write, full = files.write, [True]

    def write_or_fail(*args):
        if full[0]:
            raise OSError("the disk is full")
        write(*args)

    monkeypatch.setattr(files, "write", write_or_fail)
    checkpoint = rx.Checkpoint(epoch=1)
    manager = rx.CheckpointManager(checkpoint, tmp_path, asynchronous=True)
    for call in (
        manager.save,
        manager.sync,
        manager.restore_or_initialize,
        manager.close,
        checkpoint.sync,
        lambda: manager.latest_checkpoint,
        lambda: manager.checkpoints,
    ):
        manager.save()
        with pytest.raises(rx.errors.SaveFailed, match="OSError: the disk is full") as raised:
            call()
        assert isinstance(raised.value.__cause__, OSError)
    full[0] = False
    assert manager.checkpoints == []
    manager.save()
    manager.close()
    assert len(manager.checkpoints) == 1


def test_a_worker_that_takes_long_to_write_says_so(tmp_path, gate, monkeypatch):
    """Others would take it for stuck if it did not come to meetings for `timeout_seconds`."""
    told = []

    class Session:
        timeout_seconds = 0.2

        def all_gather(self, label, value):
            told.append(value)
            if len(told) == 3:
                gate.set()
            return [value, None]

    manager = rx.CheckpointManager(rx.Checkpoint(epoch=1), tmp_path, asynchronous=True)
    manager.save()
    with monkeypatch.context() as patched:
        patched.setattr(cluster, "session", Session)
        manager.sync()
    assert told[:3] == ["busy"] * 3
    assert told[-1] == "done"


def test_workers_that_wait_without_limit_wait_for_a_save(tmp_path, gate, monkeypatch):
    class Session:
        timeout_seconds = math.inf

        def all_gather(self, label, value):
            return [value, None]

    manager = rx.CheckpointManager(rx.Checkpoint(epoch=1), tmp_path, asynchronous=True)
    manager.save()
    threading.Timer(0.1, gate.set).start()
    with monkeypatch.context() as patched:
        patched.setattr(cluster, "session", Session)
        manager.sync()
    assert names(manager) == ["ckpt-1"]


def test_a_program_that_ends_waits_for_what_is_written(tmp_path, run_python):
    code = f"""
        import os, numpy as np, replicax as rx
        checkpoint = rx.Checkpoint(array=np.ones(1_000_000))
        manager = rx.CheckpointManager(checkpoint, {str(tmp_path)!r}, asynchronous=True)
        print(os.path.exists(manager.save()))
    """
    assert run_python(code).stdout.strip() == str(not writing.IN_BACKGROUND)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-1"]


def test_a_program_that_ends_says_what_it_waits_for(tmp_path, gate, monkeypatch, capsys):
    monkeypatch.setattr(writing, "_PATIENCE_SECONDS", 0.05)
    manager = rx.CheckpointManager(rx.Checkpoint(n=1), tmp_path, asynchronous=True)
    manager.save()
    threading.Timer(0.2, gate.set).start()
    writing._finish_all()
    assert "waits for" in capsys.readouterr().err
    assert names(manager) == ["ckpt-1"]
    manager.close()


def test_a_thread_that_cannot_start_is_not_waited_for(tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            rx.Checkpoint(n=1).save(tmp_path / "model")
    assert writing.under_way(tmp_path) == []


def test_a_program_that_ends_is_told_of_a_save_that_failed(tmp_path, run_python):
    code = f"""
        import replicax as rx
        from replicax.checkpoint import _files as files
        def fail(*args):
            raise OSError("the disk is full")
        files.write = fail
        checkpoint = rx.Checkpoint(epoch=1)
        rx.CheckpointManager(checkpoint, {str(tmp_path)!r}, asynchronous=True).save()
    """
    assert "ckpt-1 was not written: OSError: the disk is full." in run_python(code).stderr


def test_what_was_cut_off_is_never_picked_up(tmp_path):
    checkpoint = rx.Checkpoint(epoch=1)
    with rx.CheckpointManager(checkpoint, tmp_path) as manager:
        manager.save()
    complete = tmp_path / "ckpt-1"
    # Such as are left when the process is killed while it writes, or removes, a checkpoint.
    for name in ("ckpt-2.writing-0a1b", "ckpt-0.deleted"):
        (tmp_path / name / "manifest").mkdir(parents=True)
    (tmp_path / "ckpt-7").mkdir()  # somebody else's
    (tmp_path / "ckpt-9").write_text("")
    assert manager.checkpoints == [str(complete)]
    with rx.CheckpointManager(checkpoint, tmp_path) as other:
        assert other.restore_or_initialize() == str(complete)
        assert (tmp_path / "ckpt-2.writing-0a1b").exists()  # who only reads removes nothing
        other.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ckpt-1",
        "ckpt-10",  # after all that have such a name
        "ckpt-7",
        "ckpt-9",
    ]


def test_two_save_at_once(tmp_path):
    """In directories of their own, and in one; by managers and by a checkpoint."""
    array = np.arange(300_000.0)
    for _ in range(2):
        first, second, third = (
            rx.CheckpointManager(rx.Checkpoint(**objects), place, asynchronous=True)
            for objects, place in (
                ({"x": array}, tmp_path / "a"),
                ({"n": 1}, tmp_path / "b"),
                ({"x": array + 1}, tmp_path / "." / "a"),
            )
        )
        paths = [each.save() for each in (first, second, third)]
        paths.append(rx.Checkpoint(n=3).save(tmp_path / "b" / "best"))
        for each in (first, second, third):
            each.sync()
        assert len(set(paths)) == 4
        for path, offset in ((paths[0], 0.0), (paths[2], 1.0)):
            restored = rx.Checkpoint(x=np.zeros_like(array))
            restored.restore(path or "")
            equal(restored.x, array + offset)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        f"ckpt-{number}" for number in range(1, 5)
    ]


def test_what_somebody_else_writes_is_left_alone(tmp_path):
    ours = tmp_path / "ckpt-1.writing-0a1b"
    ours.mkdir()
    with files._locked(ours) as locked:
        assert locked
        rx.Checkpoint(n=1).save(tmp_path / "ckpt")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-1", ours.name]
    rx.Checkpoint(n=1).save(tmp_path / "ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt-1", "ckpt-2"]


def test_a_run_that_is_tried_again_goes_on_from_what_was_being_written(tmp_path, gate):
    def train(fails: bool) -> int:
        checkpoint = rx.Checkpoint(n=0, x=np.zeros(1000))
        with rx.CheckpointManager(checkpoint, tmp_path, asynchronous=True) as manager:
            manager.restore_or_initialize()
            begun = checkpoint.n
            checkpoint.n += 1
            manager.save()
            if fails:
                threading.Timer(0.2, gate.set).start()
                raise RuntimeError("a bad step")
        return begun

    with pytest.raises(RuntimeError, match="a bad step"):
        train(fails=True)
    assert train(fails=False) == 1


def test_what_is_being_written_can_be_restored(tmp_path, gate):
    checkpoint = rx.Checkpoint(n=1)
    manager = rx.CheckpointManager(checkpoint, tmp_path, asynchronous=True)
    path = manager.save()
    checkpoint.n = 2
    threading.Timer(0.2, gate.set).start()
    checkpoint.restore(path)
    assert checkpoint.n == 1
    manager.save()
    assert rx.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-2")
    manager.close()


def test_a_save_is_complete_when_it_returns(tmp_path, strategy):
    with strategy.scope():
        weight = rx.Variable([1.0, 2.0])
    checkpoint = rx.Checkpoint(weight=weight)
    manager = rx.CheckpointManager(checkpoint, tmp_path / "managed")
    for save in (manager.save, lambda: checkpoint.save(tmp_path / "alone" / "model")):
        path = Path(save() or "")
        assert (path / "manifest").is_dir()
        assert rx.latest_checkpoint(path.parent) == str(path)
    assert manager.latest_checkpoint == str(tmp_path / "managed" / "ckpt-1")
    checkpoint.sync()
    manager.sync()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_save_that_fails_is_raised_once(tmp_path, monkeypatch, asynchronous):
    def fail(*args):
        raise OSError("the disk is full")

    step = rx.Variable(0)
    checkpoint = rx.Checkpoint(step=step)
    manager = rx.CheckpointManager(
        checkpoint,
        tmp_path,
        step_counter=step,
        checkpoint_interval=100,
        asynchronous=asynchronous,
    )
    with monkeypatch.context() as patched:
        patched.setattr(files, "write", fail)
        if asynchronous:
            manager.save()
        with pytest.raises(rx.errors.SaveFailed, match="the disk is full"):
            checkpoint.sync() if asynchronous else manager.save()
    manager.sync()
    assert manager.save() is not None  # due at once
    assert manager.latest == str(tmp_path / "ckpt-2")


def test_one_is_kept_every_few_hours(tmp_path, monkeypatch):
    """A checkpoint every half hour, of which the latest two are kept, and one every two hours."""
    begin, clock = 1_000_000.0, [1_000_000.0]
    monkeypatch.setattr("time.time", lambda: clock[0])
    checkpoint = rx.Checkpoint(n=1)

    def manage(**options):
        return rx.CheckpointManager(checkpoint, tmp_path, 2, **options)

    manager = manage(keep_checkpoint_every_n_hours=2)
    write = files.write

    def write_now(path, *args):
        write(path, *args)
        os.utime(path, (clock[0], clock[0]))

    monkeypatch.setattr(files, "write", write_now)
    for number in range(1, 17):
        clock[0] = begin + number * 1800.0
        manager.save()
        if number % 3 == 0:  # what is known outlives the process
            manager = manage(keep_checkpoint_every_n_hours=2)
    assert names(manager) == ["ckpt-15", "ckpt-16"]
    kept = sorted(int(path.name.partition("-")[2]) for path in tmp_path.glob("ckpt-*"))
    assert kept == [4, 8, 12, 15, 16]
    # One that keeps nothing for good removes nothing that another one has kept.
    other = manage()
    other.save()
    assert names(other) == ["ckpt-16", "ckpt-17"]
    assert (tmp_path / "ckpt-4").exists()
    checkpoint.restore(tmp_path / "ckpt-4")
    (tmp_path / "ckpt.kept.json").write_text("{")
    with pytest.raises(rx.errors.CheckpointError, match=r"ckpt\.kept\.json cannot be read"):
        _ = other.checkpoints
    with pytest.raises(rx.errors.InvalidArgument, match="must be a positive number; got 0"):
        manage(keep_checkpoint_every_n_hours=0)


@pytest.fixture
def interruptible():
    """SIGINT interrupts, also where whoever has started the tests has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_wait_that_is_interrupted_can_be_repeated(tmp_path, gate, interruptible):
    checkpoint = rx.Checkpoint(n=1)
    manager = rx.CheckpointManager(checkpoint, tmp_path, asynchronous=True)
    manager.save()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        manager.sync()
    gate.set()
    checkpoint.n = 2
    manager.save()
    manager.sync()
    assert names(manager) == ["ckpt-1", "ckpt-2"]


def test_a_directory_that_cannot_be_listed_is_not_empty(tmp_path, monkeypatch):
    checkpoint = rx.Checkpoint(n=1)
    manager = rx.CheckpointManager(checkpoint, tmp_path)

    def refuse(directory):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        with pytest.raises(rx.errors.CheckpointError, match=r"cannot be listed.*Permission denied"):
            manager.restore_or_initialize()
        with pytest.raises(rx.errors.SaveFailed, match="cannot be listed"):
            manager.save()
    assert manager.restore_or_initialize() is None


def test_a_save_that_failed_is_raised_before_the_next_is_due(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("the disk is full")

    step = rx.Variable(0)
    manager = rx.CheckpointManager(
        rx.Checkpoint(step=step),
        tmp_path,
        step_counter=step,
        checkpoint_interval=100,
        asynchronous=True,
    )
    with monkeypatch.context() as patched:
        patched.setattr(files, "write", fail)
        manager.save()
        for each in writing.under_way(tmp_path):
            each.news(None)
        step.assign_add(1)
        with pytest.raises(rx.errors.SaveFailed, match="the disk is full"):
            manager.save()
    assert manager.save() is not None  # for the one that failed
    step.assign_add(1)
    assert manager.save() is None
    step.assign(0)  # as after restoring an older one
    assert manager.save() is not None
    manager.close()


def test_what_is_in_the_way_is_passed_by(tmp_path):
    checkpoint = rx.Checkpoint(n=1)
    with rx.CheckpointManager(checkpoint, tmp_path) as manager:
        manager.save()
        (tmp_path / "ckpt-2").mkdir()
        with pytest.raises(rx.errors.InvalidArgument, match="there is ckpt-2 in"):
            manager.save(2)
        manager.save()
    assert names(manager) == ["ckpt-1", "ckpt-3"]
    (tmp_path / "ckpt-3" / "manifest" / "metadata").write_text("{")
    with pytest.raises(
        rx.errors.InvalidCheckpoint, match=r"the one before, remove it\. Earlier ones are .*ckpt-1"
    ):
        manager.restore_or_initialize()


def test_an_old_one_that_stays_is_no_failure(tmp_path, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "remove", fail)
    manager = rx.CheckpointManager(rx.Checkpoint(n=1), tmp_path, 1)
    manager.save()
    with pytest.warns(RuntimeWarning, match=r"was written, but the old one .*ckpt-1 could not"):
        manager.save()
    assert names(manager) == ["ckpt-1", "ckpt-2"]


def test_arguments_that_mean_nothing(tmp_path):
    checkpoint = rx.Checkpoint(epoch=1)
    with pytest.raises(rx.errors.InvalidType, match=r"is for an `rx\.Checkpoint`"):
        rx.CheckpointManager(tmp_path, checkpoint)  # type: ignore[arg-type]
    with pytest.raises(rx.errors.InvalidArgument, match=r"`max_to_keep`.*got 0"):
        rx.CheckpointManager(checkpoint, tmp_path, 0)
    with pytest.raises(rx.errors.InvalidArgument, match="needs a `step_counter`"):
        rx.CheckpointManager(checkpoint, tmp_path, checkpoint_interval=3)
    with pytest.raises(rx.errors.InvalidArgument, match="no path; got 'a/b'"):
        rx.CheckpointManager(checkpoint, tmp_path, checkpoint_name="a/b")
    with pytest.raises(rx.errors.InvalidArgument, match="no path; got None"):
        rx.CheckpointManager(checkpoint, tmp_path, checkpoint_name=None)  # type: ignore[arg-type]
    with pytest.raises(rx.errors.InvalidType, match="`init_fn` must be a function; got 3"):
        rx.CheckpointManager(checkpoint, tmp_path, init_fn=3)  # type: ignore[arg-type]
    with pytest.raises(rx.errors.InvalidArgument, match=r"`max_to_keep`.*got True"):
        rx.CheckpointManager(checkpoint, tmp_path, True)
    with pytest.raises(rx.errors.InvalidType, match="counts steps; got 'steps'"):
        rx.CheckpointManager(checkpoint, tmp_path, step_counter="steps")
    for number in (7.9, -1):
        with pytest.raises(rx.errors.InvalidArgument, match=f"from 0; got {number}"):
            rx.CheckpointManager(checkpoint, tmp_path).save(number)  # type: ignore[arg-type]
    for prefix in ("", ".", "..", f"{tmp_path}/"):
        with pytest.raises(rx.errors.InvalidArgument, match="where there is no name"):
            checkpoint.save(prefix)
    with pytest.raises(rx.errors.InvalidType, match="A checkpoint has a path; got 3"):
        checkpoint.restore(3)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_cut_off_at_any_moment_is_complete_or_not_there(tmp_path):
    program = Path(__file__).with_name("every_moment.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    # The old one, until its last step makes the new one complete.
    renamed = re.compile(r"os\.rename /ckpt-2\.writing-\w+/checkpoint")
    last = [bool(renamed.fullmatch(moment)) for moment in seen["moments"]].index(True) + 1
    assert seen["found"] == [1] * last + [2] * (len(seen["found"]) - last)
    assert 20 < last < len(seen["found"])
