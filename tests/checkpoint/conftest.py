from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def run_python() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a program in a process of its own."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-c", inspect.cleandoc(code)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done

    return run
