"""The launcher and workers that train: one fails, all end, with the exit code of the culprit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from workers import ROOT

PROGRAM = "tests/multiprocess/faulty_training.py"
CACHED = "tests/multiprocess/cached_training.py"


def launch(event: str, worker: int, *, steps: int = 8) -> subprocess.CompletedProcess[str]:
    return launched(PROGRAM, event, str(worker), "3", "4", str(steps))


def launched(*program: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, "-m", "replicax", "launch", "--workers", "2", *program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def running(program: str) -> list[int]:
    """The processes that run a program."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            command = (directory / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if program in command:
            found.append(int(directory.name))
    return found


@pytest.mark.parametrize(
    ("event", "code", "how"),
    [
        ("raise", 1, "exit code 1"),
        ("SIGKILL", 137, "killed by SIGKILL"),
    ],
)
def test_a_failure_ends_all(event, code, how):
    outcome = launch(event, 1)
    assert outcome.returncode == code, outcome.stdout + outcome.stderr
    assert f"[launcher] Worker 1 failed first: {how}" in outcome.stderr
    assert re.search(r"^\[worker 0\] replicax\.errors\.WorkerLost: ", outcome.stdout, re.MULTILINE)
    # Its traceback is shown once as it comes, and once with the verdict.
    if event == "raise":
        assert outcome.stdout.count("Traceback") == 1
        assert outcome.stderr.count("ArithmeticError: a fault of the program") == 1
    time.sleep(0.1)
    assert running(PROGRAM) == []


# How one of the workers ends, its exit code, and what the other says of it.
CAUSES = {
    "exit": (3, r"WorkerLost: worker {} \(.*\) has finished its program"),
    "caught": (3, r"caught: worker {} \(.*\) has finished its program"),
    "raise": (1, r"WorkerLost: worker {} \(.*\) failed: ArithmeticError: a fault"),
    "hook": (1, r"own hook: WorkerLost worker {} \(.*\) failed: ArithmeticError: a fault"),
    "thread": (1, r"WorkerLost: worker {} \(.*\) failed: ArithmeticError: a fault"),
    "tracing": (1, r"WorkerLost: worker {} \(.*\) failed: ArithmeticError: a fault"),
    "restore": (
        1,
        r"CheckpointError: worker {} could not restore it, so that no worker has: Arith",
    ),
    "input": (1, r"InputFailed: The input of worker {} failed: ArithmeticError: a fault"),
}


# Races show after many runs: `REPEATS=100 pytest -k first_cause` makes 200 of each kind.
REPEATS = int(os.environ.get("REPEATS", "1"))


@pytest.mark.parametrize("how", CAUSES)
def test_the_first_cause_wins_whatever_order_processes_end_in(how):
    code, said = CAUSES[how]
    for culprit in [0, 1] * REPEATS:
        outcome = launched("tests/multiprocess/failing.py", how, str(culprit))
        everything = outcome.stdout + outcome.stderr
        assert outcome.returncode == code, everything
        assert f"Worker {culprit} failed first: exit code {code}" in outcome.stderr, everything
        assert re.search(said.format(culprit), outcome.stdout), everything


def test_all_is_well():
    outcome = launch("nothing", 0, steps=3)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    for worker in range(2):
        assert f"[worker {worker}] step 2" in outcome.stdout


def test_a_second_start_finds_what_the_first_one_has_compiled(tmp_path):
    def start() -> list[dict[str, Any]]:
        outcome = launched("--compilation-cache", str(tmp_path), CACHED)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
        said = re.findall(r"^\[worker (\d)\] (\{.*\})$", outcome.stdout, re.MULTILINE)
        return [json.loads(text) for _, text in sorted(said)]

    first, second = start(), start()
    assert [worker["losses"] for worker in second] == [worker["losses"] for worker in first]
    assert all(worker["compiled"] > 0 for worker in first)
    assert [worker["compiled"] for worker in second] == [0, 0]
    for before, after in zip(first, second, strict=True):
        assert after["found"] == before["compiled"] + before["found"]
