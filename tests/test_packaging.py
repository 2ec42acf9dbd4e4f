"""The wheel and the sdist: what is in them, and that they install."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def run(*command: Any, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A directory with the sdist, and the wheel that is made of it."""
    target = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", target, ROOT, cwd=target)
    return target


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (found,) = built.glob("*.whl")
    return found


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_what_is_in_them(built, wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    package = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "replicax").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in files if name.startswith("replicax/")} == package
    assert "replicax/py.typed" in package
    assert "replicax/planning/_page.css" in package
    assert any(name.endswith("licenses/LICENSE") for name in files)
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "docs/README.md", "tests/conftest.py", "noxfile.py"} <= names


def test_the_metadata_is_complete(wheel):
    told = metadata_of(wheel)
    assert told["Name"] == "replicax"
    assert told["Version"] == metadata.version("replicax")
    assert told["Author"] == "The replicax developers"
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Requires-Python"] == ">=3.11"
    assert told["Summary"]
    assert told["Keywords"]
    classifiers = told.get_all("Classifier") or []
    for version in ("3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in classifiers


def test_the_description_has_no_link_that_leads_nowhere(wheel):
    told = metadata_of(wheel)
    assert told["Description-Content-Type"] == "text/markdown"
    text = told.get_payload()
    assert "A complete training loop" in text
    links = re.findall(r"\]\(([^)]*)\)|^\[[^\]]+\]:\s*(\S+)|(?:src|href)=\"([^\"]*)\"", text, re.M)
    targets = [target for link in links for target in link if target]
    assert all(target.startswith("https://") for target in targets), targets


def test_it_installs_into_an_empty_environment(wheel, tmp_path):
    venv.create(tmp_path / "empty", with_pip=True)
    bin = tmp_path / "empty" / "bin"
    run(bin / "python", "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    assert (
        run(bin / "replicax", "--version", cwd=tmp_path)
        .strip()
        .endswith(metadata.version("replicax"))
    )
    program = (
        "import jax.numpy as jnp, replicax as rx; s = rx.MirroredStrategy(['CPU:0', 'CPU:1']); "
        "print(rx.__file__, float(s.reduce('SUM', s.run(lambda: jnp.ones(())), axis=None)))"
    )
    where, total = run(bin / "python", "-c", program, cwd=tmp_path).split()
    assert Path(where).is_relative_to(tmp_path)
    assert float(total) == 2.0
