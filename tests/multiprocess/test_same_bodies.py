"""Several workers run the tests that hold for every strategy, in step, with their strategy."""

from __future__ import annotations

import re

import pytest
from workers import run

ALL = [
    "tests/collectives",
    "tests/values",
    "tests/variables",
    "tests/strategies",
    "tests/compat",
    "tests/execution",
    "tests/input",
    "tests/checkpoint",
    "tests/termination",
    "tests/integrations",
    "tests/parity/test_captured_values.py",
    "tests/parity/test_programs_as_they_are.py",
    "tests/test_containers.py",
    "tests/test_context.py",
    "tests/test_bad_input.py",
    "tests/test_exporting.py",
    "tests/test_losses.py",
    "tests/test_metrics.py",
]
# How state lies over the workers matters for these.
ABOUT_STATE = [
    "tests/variables",
    "tests/strategies",
    "tests/execution",
    "tests/parity/test_captured_values.py",
    "tests/parity/test_programs_as_they_are.py",
    "tests/test_exporting.py",
]
# With more workers than cores it takes long: those that compare with one device on the whole batch.
TRAINING = "tests/integrations/test_optax.py::test_training_equals_numpy_on_the_whole_batch"
# Sixteen kinds of programs, compiled, and some of them eagerly.
JAX_PROGRAMS = "tests/parity/test_jax_programs.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "devices", "strategy", "tests", "at_least"),
    [
        (2, 1, "LOGICAL_DEVICES=1", ALL, 150),
        (2, 2, "STATE=sharded", [*ABOUT_STATE, TRAINING], 150),
        (2, 2, "LOGICAL_DEVICES=1", [TRAINING, "tests/collectives", "tests/input"], 50),
        (2, 1, "LOGICAL_DEVICES=1", [JAX_PROGRAMS], 20),
        (4, 1, "LOGICAL_DEVICES=1", [TRAINING], 6),
        (4, 2, "LOGICAL_DEVICES=1", [TRAINING], 6),
        (2, 4, "LOGICAL_DEVICES=2", [TRAINING, "tests/collectives"], 20),
    ],
    ids=[
        "2 x 1",
        "2 x 2, sharded",
        "2 x 2",
        "2 x 1, programs of JAX",
        "4 x 1",
        "4 x 2",
        "2 x 4, replicas of 2",
    ],
)
def test_the_same_tests_pass_among_workers(tmp_path, workers, devices, strategy, tests, at_least):
    arguments = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    # Each has its own folder for temporary ones, which pytest clears away when it ends.
    roots = [tmp_path / f"worker-{worker}" for worker in range(workers)]
    for root in roots:
        root.mkdir()
    told = [["env", strategy, f"PYTEST_DEBUG_TEMPROOT={root}"] for root in roots]
    ended = run(arguments, 900, workers=workers, devices=devices, prefix=told)
    passed = set()
    for each in ended:
        assert each.code == 0, each.output[-5000:]
        summary = re.search(r"^(\d+) passed.* in ", each.output, re.MULTILINE)
        assert summary is not None, each.output[-1000:]
        assert "skipped" not in summary[0]
        passed.add(int(summary[1]))
    assert len(passed) == 1, "they did not run the same tests"
    assert passed.pop() >= at_least
