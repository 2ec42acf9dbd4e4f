"""The virtual environments that the peers run in, made on first use.

A peer is no dependency of replicax, and its pins need not agree with ours.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click

INSTALL_LIMIT_SECONDS = 1800


@dataclass(frozen=True)
class PeerEnvironment:
    """A folder with a virtual environment that holds what a peer requires."""

    name: str
    requirements: str  # as pip takes them, separated by blanks

    def python(self, folder: Path) -> Path:
        """Return the interpreter of this environment below `folder`; make it if needed."""
        home = folder.absolute() / self.name
        python, stamp = home / "bin" / "python", home / "installed"
        # The stamp is written last: an interrupted installation leaves none, a changed requirement
        # a stale one, and either is installed again.
        installed = stamp.read_text().strip() if stamp.exists() else None
        if installed != self.requirements or not python.exists():
            click.echo(f"Installing {self.requirements} into {home}; it takes a minute.", err=True)
            self._run([sys.executable, "-m", "venv", str(home)])
            install = ["install", "--quiet", "--disable-pip-version-check"]
            self._run([str(python), "-m", "pip", *install, *self.requirements.split()])
            stamp.write_text(f"{self.requirements}\n")
        return python

    def _run(self, command: list[str]) -> None:
        try:
            subprocess.run(command, check=True, timeout=INSTALL_LIMIT_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            raise click.ClickException(
                f"The environment {self.name!r} could not be made with {self.requirements!r}: "
                f"{error} Its own message is above. Mend that, or point --peer-environments at a "
                "folder that has the environment (benchmarks/README.md says how)."
            ) from error
