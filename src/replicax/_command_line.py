"""The command `replicax`; each of its commands is described where it is defined."""

from __future__ import annotations

import click

from replicax import __version__
from replicax.doctor._command import doctor_command
from replicax.launch._command import launch_command
from replicax.planning._command import plan_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="replicax")
def main() -> None:
    """Use the tf.distribute.Strategy programming model on JAX."""


main.add_command(doctor_command)
main.add_command(launch_command)
main.add_command(plan_command)
