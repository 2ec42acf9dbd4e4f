"""The environments in which the tests must pass; `make matrix` runs them all."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import nox
from packaging.requirements import Requirement

nox.options.default_venv_backend = "venv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = True
nox.options.reuse_venv = "yes"

OLDEST, NEWEST = "3.11", "3.13"


def switch_on_every_python_of_pyenv() -> None:
    """Make `python3.13` found where pyenv has it: its commands answer for active versions only."""
    if shutil.which("pyenv"):
        active, installed = (
            subprocess.run(["pyenv", *command], capture_output=True, text=True).stdout
            for command in (["version-name"], ["versions", "--bare"])
        )
        versions = [*active.strip().split(":"), *installed.split()]
        os.environ["PYENV_VERSION"] = ":".join(dict.fromkeys(versions))


switch_on_every_python_of_pyenv()


@nox.session(python=OLDEST)
def oldest(session: nox.Session) -> None:
    """Test with the lowest version of every requirement, and of Keras and Flax."""
    constraints = Path(session.create_tmp()) / "oldest.txt"
    constraints.write_text("\n".join(lowest_versions()))
    test(session, "--constraint", str(constraints))


@nox.session
def default(session: nox.Session) -> None:
    """Test with what pip chooses for the Python that `make` uses."""
    test(session)


@nox.session(python=NEWEST)
def newest(session: nox.Session) -> None:
    """Test with the newest version of everything."""
    test(session, "--upgrade", "--upgrade-strategy", "eager")


def test(session: nox.Session, *pip_arguments: str) -> None:
    """Run the tests, but for the slow ones, as `make test` does."""
    session.install(*pip_arguments, "--editable", ".[dev]")
    session.run("python", "-m", "pip", "list")
    session.run("make", "test", f"BIN={session.bin}", external=True)


def lowest_versions() -> list[str]:
    """Return what replicax requires, each pinned to its lower bound."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = map(Requirement, [*project["dependencies"], *extras["keras"], *extras["flax"]])
    return [
        f"{requirement.name}=={specifier.version}"
        for requirement in requirements
        for specifier in requirement.specifier
        if specifier.operator == ">="
    ]
