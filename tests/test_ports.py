"""The ports of tutorials compute what the TensorFlow programs did, of which losses are recorded."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click.testing
import pytest
import sklearn.datasets  # noqa: F401  here, because it sets environment variables
from numpy.testing import assert_allclose
from workers import ROOT

PORTS = ROOT / "examples" / "ports"

# Sums in another order differ by 2e-6 at most on the machine where this was recorded, after 230
# steps; another processor or release may be a little further away. A wrong constant is much more:
# with Optax's epsilon in place of Keras', Adam is 5e-3 away in the second epoch.
TOLERANCE = 1e-4

# Keras 3.15 has it when it saves.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture
def run(monkeypatch, tmp_path) -> Callable[..., str]:
    """Run a program in this process; return what it printed."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.syspath_prepend(PORTS)  # as `python examples/ports/….py` has it
        main = runpy.run_path(str(PORTS / f"{name}.py"))["main"]
        outcome = click.testing.CliRunner().invoke(
            main, [*arguments, "--losses", str(tmp_path / "losses.json")], catch_exceptions=False
        )
        assert outcome.exit_code == 0
        return outcome.output

    return run


def launch(name: str, file: Path, *arguments: str, restarts: int = 0) -> str:
    """Run a program by two workers; return what they printed."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "XLA_FLAGS")}
    environment["PYTHONPATH"] = str(ROOT / "src")
    outcome = subprocess.run(
        [
            *(sys.executable, "-m", "replicax", "launch"),
            *("--workers", "2", "--max-restarts", str(restarts)),
            *(str(PORTS / f"{name}.py"), *arguments, "--losses", str(file)),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    return outcome.stdout


def recorded(name: str) -> dict[str, list[float]]:
    return json.loads((PORTS / "recorded" / f"{name}.json").read_text())


def measured(directory: Path) -> dict[str, list[float]]:
    return json.loads((directory / "losses.json").read_text())


@pytest.mark.parametrize("replicas", ["1", "2"])
def test_custom_training_loop(run, replicas, tmp_path):
    output = run(
        *("custom_training_loop", "--replicas", replicas, "--epochs", "2"),
        *("--directory", str(tmp_path / "checkpoints")),
    )
    there, ours = recorded("custom_training_loop"), measured(tmp_path)
    assert_allclose(ours["loss"], there["loss"][:46], TOLERANCE)
    assert_allclose(ours["test_loss"], there["test_loss"][:2], TOLERANCE)
    accuracy = re.search(r"Restored \S+/ckpt-2; accuracy without a strategy: (\S+)", output)
    assert accuracy is not None
    assert_allclose(float(accuracy[1]), ours["test_accuracy"][-1], TOLERANCE)


@pytest.mark.parametrize("replicas", ["1", "2"])
def test_input(run, replicas, tmp_path):
    output = run("input", "--replicas", replicas)
    assert f"images ({64 // int(replicas)}, 64)" in output
    check_input(tmp_path)


@pytest.mark.slow
def test_input_by_workers(tmp_path):
    launch("input", tmp_path / "losses.json")
    check_input(tmp_path)


def check_input(directory: Path) -> None:
    there, ours = recorded("input"), measured(directory)
    assert len(ours["loss"]) == 4 * 23
    assert_allclose(ours["loss"], there["loss"], TOLERANCE)
    assert_allclose(ours["mean_loss_of_last_epoch"], there["mean_loss_of_last_epoch"], TOLERANCE)


def test_keras_alone(run, tmp_path):
    """Without a TF_CONFIG, the strategy has all devices of this process: eight, in the tests."""
    pytest.importorskip("keras", reason="Keras is not installed: pip install replicax[keras]")
    output = run("keras_workers", "--epochs", "2", "--directory", str(tmp_path / "saved"))
    assert "one of 8 replicas" in output
    assert_allclose(measured(tmp_path)["loss"], recorded("keras_workers")["loss"][:2], TOLERANCE)


@pytest.mark.slow
def test_keras_workers(tmp_path):
    pytest.importorskip("keras", reason="Keras is not installed: pip install replicax[keras]")
    saved = tmp_path / "saved"
    output = launch(
        "keras_workers", tmp_path / "losses.json", "--epochs", "2", "--directory", str(saved)
    )
    assert_allclose(measured(tmp_path)["loss"], recorded("keras_workers")["loss"][:2], TOLERANCE)
    # What the chief has saved, and nothing of the other worker, nor of the backup.
    assert sorted(each.name for each in saved.iterdir()) == ["checkpoints", "digits.keras"]
    assert sorted(each.name for each in (saved / "checkpoints").glob("ckpt-*")) == ["ckpt-1"]
    trained = re.search(r"Test accuracy on 360 unseen digits: (\S+)", output)
    loaded = re.search(r"Loaded from digits.keras, on one device: (\S+)", output)
    assert trained is not None
    assert loaded is not None
    assert trained[1] == loaded[1]


@pytest.mark.slow
def test_keras_workers_that_are_killed(tmp_path):
    pytest.importorskip("keras", reason="Keras is not installed: pip install replicax[keras]")
    output = launch(
        *("keras_workers", tmp_path / "losses.json", "--epochs", "3", "--kill-at", "35"),
        *("--directory", str(tmp_path / "saved")),
        restarts=1,
    )
    assert "replicax.errors.WorkerLost: worker 1" in output
    # The second run begins in the second epoch, the loss of which is that of all of its steps.
    assert_allclose(measured(tmp_path)["loss"], recorded("keras_workers")["loss"][1:3], TOLERANCE)


@pytest.mark.parametrize("name", ["custom_training_loop", "input", "keras_workers"])
def test_the_pages_show_the_programs(name):
    """Listings come in pairs, TensorFlow and replicax; `...` stands for other lines."""
    page = (ROOT / "docs" / "ports" / f"{name}.md").read_text()
    cells = re.findall(r"<td>\n\n```python\n(.*?)```\n\n</td>", page, re.DOTALL)
    programs = [(PORTS / folder / f"{name}.py").read_text() for folder in ("reference", ".")]
    assert len(cells) >= 4
    for number, cell in enumerate(cells):
        lines = {line.strip() for line in programs[number % 2].splitlines()}
        assert {line.strip() for line in cell.splitlines()} - {"..."} <= lines
