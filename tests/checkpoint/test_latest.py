"""Finding checkpoints: the latest of a directory, and those that another program saves."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

import replicax as rx


def test_the_latest_of_a_directory(tmp_path):
    assert rx.latest_checkpoint(tmp_path / "nowhere") is None
    assert rx.latest_checkpoint(tmp_path) is None
    checkpoint = rx.Checkpoint(n=1)
    for number in range(1, 12):
        path = checkpoint.save(tmp_path / "model")
        assert Path(path).name == f"model-{number}"
        assert rx.latest_checkpoint(tmp_path) == path
    # Numbers tell, whatever the times are that a copy has.
    os.utime(tmp_path / "model-2", (2e9, 2e9))
    assert rx.latest_checkpoint(tmp_path) == path
    # Among names, the time does.
    best = rx.Checkpoint(n=2).save(tmp_path / "best")
    os.utime(path, (1e9, 1e9))
    assert rx.latest_checkpoint(str(tmp_path)) == best
    # What has no number, or is no checkpoint, is not looked at.
    checkpoint.write(tmp_path / "exact")
    (tmp_path / "other-99").mkdir()
    (tmp_path / "model-100").write_text("")
    assert rx.latest_checkpoint(tmp_path) == best


def test_restoring_the_latest_of_nothing_does_nothing(tmp_path):
    checkpoint = rx.Checkpoint(n=1)
    report = checkpoint.restore(rx.latest_checkpoint(tmp_path))
    assert (report.path, report.restored, report.unused) == (None, (), ())
    assert (report.missing, report.deferred) == ((), ())
    assert report.expect_partial() is report
    assert repr(report) == "<RestoreReport: there was no checkpoint to restore>"
    for method in (report.assert_consumed, report.assert_existing_objects_matched):
        with pytest.raises(rx.errors.CheckpointMismatch, match="Nothing has been restored"):
            method()
    assert (checkpoint.n, checkpoint.save_counter) == (1, 0)


def test_each_checkpoint_that_is_the_latest_is_given_out_once(tmp_path):
    checkpoint = rx.Checkpoint(n=1)
    called = []

    def save_two_more() -> bool:
        called.append(len(called))
        if len(called) == 1:
            checkpoint.save(tmp_path / "model")
            checkpoint.save(tmp_path / "model")
        return len(called) == 3

    first = checkpoint.save(tmp_path / "model")
    seen = list(rx.checkpoints_iterator(tmp_path, timeout=0, timeout_fn=save_two_more))
    # The second one was followed by the third before anybody asked.
    assert seen == [first, str(tmp_path / "model-3")]
    assert called == [0, 1, 2]


def test_without_a_function_the_iterator_ends_after_the_timeout(tmp_path):
    assert list(rx.checkpoints_iterator(tmp_path / "later", timeout=0.01)) == []


def test_the_next_one_is_waited_for(tmp_path, monkeypatch):
    """It waits as long as it takes, and not less than the interval."""
    checkpoint = rx.Checkpoint(n=1)
    slept, clock = [], [0.0]

    def sleep(seconds):
        slept.append(seconds)
        clock[0] += seconds
        if len(slept) == 3:
            checkpoint.save(tmp_path / "model")

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    seen = rx.checkpoints_iterator(tmp_path, min_interval_secs=60)
    assert next(seen) == str(tmp_path / "model-1")
    checkpoint.save(tmp_path / "model")
    assert next(seen) == str(tmp_path / "model-2")
    assert slept == [0.5, 0.5, 0.5, 60.0]


def test_no_limit_to_the_wait(tmp_path, monkeypatch):
    checkpoint = rx.Checkpoint(epoch=1)
    path = str(tmp_path / "model-1")
    monkeypatch.setattr("time.sleep", lambda seconds: checkpoint.save(tmp_path / "model"))
    assert next(rx.checkpoints_iterator(tmp_path, timeout=math.inf)) == path


def test_bad_arguments_are_refused_at_once(tmp_path):
    with pytest.raises(rx.errors.InvalidArgument, match="`timeout` must be a number of seconds"):
        rx.checkpoints_iterator(tmp_path, timeout=-1)
    with pytest.raises(rx.errors.InvalidArgument, match="`min_interval_secs` must be"):
        rx.checkpoints_iterator(tmp_path, "1")  # type: ignore[arg-type]
    with pytest.raises(rx.errors.InvalidType, match="`timeout_fn` must be a function"):
        rx.checkpoints_iterator(tmp_path, timeout_fn=3)  # type: ignore[arg-type]
    with pytest.raises(rx.errors.InvalidArgument, match="Mount the bucket"):
        rx.latest_checkpoint("gs://bucket/run")
