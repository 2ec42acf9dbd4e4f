"""The programs of docs/from_pytorch.md train the same."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import equal

PROGRAMS = Path(__file__).parents[1] / "examples" / "from_pytorch"


def weights(*command: str) -> list[float]:
    """Return what a program says in the end."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = re.search(r"weights (\[.*\])", done.stdout)
    assert said, done.stdout + done.stderr
    return ast.literal_eval(said[1])


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch", "accelerate"])
def test_both_sides_train_the_same(library):
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install replicax[torch]")
    pytest.importorskip(library, reason="Accelerate is not installed: pip install accelerate")
    name = {"torch": "with_ddp.py", "accelerate": "with_accelerate.py"}[library]
    theirs = weights("torch.distributed.run", "--nproc-per-node=2", str(PROGRAMS / name))
    workers = ("--workers=2", "--devices-per-worker=1")
    ours = weights("replicax", "launch", *workers, str(PROGRAMS / "with_replicax.py"))
    equal(ours, theirs, 1e-5)
