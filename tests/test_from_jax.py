"""The programs of docs/from_jax.md: both sides train the same, and the page shows what differs."""

from __future__ import annotations

import difflib
import runpy
from pathlib import Path

import jax
import pytest
from support import equal

PROJECT = Path(__file__).parent.parent
PROGRAMS = PROJECT / "examples" / "from_jax"
NAMES = sorted(file.stem for file in (PROGRAMS / "jax").glob("*.py"))

pytest.importorskip("equinox", reason="Equinox is not installed: pip install equinox")
pytest.importorskip("flax", reason="Flax is not installed: pip install replicax[flax]")


SIDES = ("jax", "replicax")


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_train_the_same(name):
    expected, actual = (
        runpy.run_path(str(PROGRAMS / side / f"{name}.py"))["train"]() for side in SIDES
    )
    for ours, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        equal(ours, wanted, 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_lines_that_differ(name):
    texts = [(PROGRAMS / side / f"{name}.py").read_text() for side in SIDES]
    after_docstrings = [text.splitlines()[2:] for text in texts]
    _, _, _, *lines = difflib.unified_diff(*after_docstrings, n=1, lineterm="")
    shown = "\n".join("" if line.startswith("@@") else line.rstrip() for line in lines).strip("\n")
    assert f"```diff\n{shown}\n```" in (PROJECT / "docs" / "from_jax.md").read_text()
