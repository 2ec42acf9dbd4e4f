"""Workers that are killed at any moment, and started again, end as if nothing had happened."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workers import ROOT


def launch(arguments: list[str], restarts: int) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "XLA_FLAGS")}
    options = ["--workers", "2", "--max-restarts", str(restarts), "--backoff", "0"]
    outcome = subprocess.run(
        [sys.executable, "-m", "replicax", "launch", *options, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60 + 40 * restarts,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


def train(directory: Path, moments: list[str]) -> str:
    return launch(["tests/multiprocess/killed_training.py", str(directory), *moments], len(moments))


def result(output: str, name: str) -> str:
    first, second = re.findall(rf"^\[worker \d\] {name} (.*)$", output, re.MULTILINE)
    assert first == second
    return first


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> str:
    directory = tmp_path_factory.mktemp("undisturbed")
    return result(train(directory, []), "weight")


@pytest.mark.slow
@pytest.mark.parametrize(
    "moments",
    [
        # Worker 0 writes, so there is more to cut off.
        ["0:between", "0:before", "0:creating", "0:writing", "0:committing", "0:after"],
        ["1:between", "1:before", "1:during", "1:after", "0:during", "0:removing"],
    ],
)
def test_workers_that_are_killed_end_as_if_they_had_not_been(moments, undisturbed, tmp_path):
    output = train(tmp_path, moments)
    happened = re.findall(r"^\[worker (\d)\] killed while (\w+)$", output, re.MULTILINE)
    assert [":".join(each) for each in happened] == moments
    assert result(output, "weight") == undisturbed
    assert result(output, "seen") == "[1]"
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert len(checkpoints) == 1, checkpoints


@pytest.mark.slow
def test_the_example_ends_with_the_same_weights_when_it_is_killed(tmp_path):
    def last_lines(name: str, kills: int) -> list[str]:
        output = launch(
            ["examples/resumable.py", "--directory", str(tmp_path / name), "--kills", str(kills)],
            restarts=kills,
        )
        assert output.count("This worker is killed.") == kills
        return output.splitlines()[-2:]

    undisturbed = last_lines("undisturbed", 0)
    assert undisturbed[0] == "[worker 0] Every row was seen once in every epoch: True."
    assert last_lines("killed", 2) == undisturbed
