"""The tutorial: its notebook has its text, runs, and prints what the page says."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def cells(notebook: Path) -> list[dict]:
    return [each for each in json.loads(notebook.read_text())["cells"] if "outputs" in each]


def printed(cell: dict) -> str:
    return "".join("".join(x["text"]) for x in cell["outputs"] if x.get("name") == "stdout")


def test_the_notebook_is_made_from_the_page():
    made = runpy.run_path(str(DOCS / "tutorial_notebook.py"))
    page, notebook = DOCS / "tutorial.md", DOCS / "tutorial.ipynb"
    assert notebook.read_text() == made["written"](page.read_text()), "run tutorial_notebook.py"


@pytest.mark.slow
def test_the_notebook_prints_what_the_page_says(tmp_path):
    bin = Path(sys.executable).parent
    executed = tmp_path / "tutorial.ipynb"  # which runs where it lies
    shutil.copy(DOCS / "tutorial.ipynb", executed)
    done = subprocess.run(
        [bin / "jupyter-execute", executed, "--inplace", "--timeout=300"],
        env=os.environ | {"PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for said, seen in zip(cells(DOCS / "tutorial.ipynb"), cells(executed), strict=True):
        if not said["source"].startswith("%%writefile"):  # which says that it has written
            assert printed(seen) == printed(said)
