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


def train(layout: str, directory: Path, moments: list[str]) -> str:
    program = "tests/multiprocess/killed_training.py"
    return launch([program, layout, str(directory), *moments], len(moments))


def result(output: str, name: str) -> str:
    first, second = re.findall(rf"^\[worker \d\] {name} (.*)$", output, re.MULTILINE)
    assert first == second
    return first


# Worker 0 gives checkpoints their name: it is killed when all is written, but has no name yet. Of
# state that is divided each worker writes a part. What the other moments of writing leave behind is
# seen in tests/checkpoint.
MOMENTS = {
    "mirrored": [
        *("0:between", "0:before", "0:committing", "0:after"),
        *("1:between", "1:before", "1:during", "1:after"),
    ],
    "sharded": ["0:writing", "0:committing", "1:writing", "1:during", "1:after"],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", MOMENTS)
def test_workers_that_are_killed_end_as_if_they_had_not_been(layout, tmp_path):
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    undisturbed = result(train(layout, tmp_path / "undisturbed", []), "weight")
    output = train(layout, tmp_path / "killed", MOMENTS[layout])
    happened = re.findall(r"^\[worker (\d)\] killed while (\w+)$", output, re.MULTILINE)
    assert [":".join(each) for each in happened] == MOMENTS[layout]
    assert result(output, "weight") == undisturbed
    assert result(output, "seen") == "[1]"
    checkpoints = sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir())
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
    assert last_lines("killed", 1) == undisturbed
