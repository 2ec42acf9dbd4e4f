"""One worker is told to end: all save at one step, end, and go on as if nothing had happened."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workers import ROOT, run

PROGRAM = "tests/multiprocess/preempted_training.py"


def launch(directory: Path, event: str, workers: int) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "XLA_FLAGS")}
    environment["PYTHONPATH"] = f"{ROOT / 'tests'}:{environment.get('PYTHONPATH', '')}"
    options = ["--workers", str(workers), "--max-restarts", "1", "--backoff", "0"]
    return subprocess.run(
        [sys.executable, "-m", "replicax", "launch", *options, PROGRAM, str(directory), event],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def said(text: str, output: str) -> list[str]:
    return re.findall(rf"^\[worker \d\] {text} (.*)$", output, re.MULTILINE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, list[str]]:
    """Return the result of an undisturbed training, by the number of workers."""
    states = {}
    for workers in (1, 2):
        ended = launch(tmp_path_factory.mktemp("undisturbed"), "nothing:0", workers)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        states[workers] = said("state", ended.stdout)
        assert len(states[workers]) == workers
    return states


@pytest.mark.parametrize(
    ("event", "workers"),
    [
        ("SIGTERM:0", 1),
        ("SIGTERM:0", 2),
        ("SIGTERM:1", 2),
        ("watcher:1", 2),
        ("grace:1", 2),
    ],
)
@pytest.mark.slow
def test_workers_that_are_told_to_end_go_on_bit_for_bit(tmp_path, undisturbed, event, workers):
    ended = launch(tmp_path, event, workers)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(said("told at step", ended.stdout)) == 1
    assert "exit code 143" in ended.stderr
    begun = [int(step) for step in said("begins at step", ended.stdout)]
    assert len(begun) == 2 * workers
    assert begun[:workers] == [0] * workers
    # All had saved at one step, and went on from there.
    assert len(set(begun[workers:])) == 1
    assert 4 < begun[-1] < 12
    assert said("state", ended.stdout) == undisturbed[workers]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_all_workers_end_with_the_code_that_is_worth_a_restart(tmp_path):
    ended = run([PROGRAM, str(tmp_path), "SIGTERM:1"], 100)
    assert [each.code for each in ended] == [143, 143], [each.output for each in ended]
    assert "ckpt-1 was saved, and all workers end now." in ended[0].output
    for each in ended:
        assert "Traceback" not in each.output
        assert "WorkerLost" not in each.output
