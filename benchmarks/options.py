"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

QUICK_ROUNDS = 2

rounds_option = click.option(
    "--rounds",
    default=5,
    show_default=True,
    type=click.IntRange(min=5),
    help="Turns of each contestant in a sitting.",
)
sittings_option = click.option(
    "--sittings",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="How often all processes of a cell are started anew.",
)
quick_option = click.option(
    "--quick",
    is_flag=True,
    help=f"To see that it works: {QUICK_ROUNDS} rounds, the smallest networks, few replicas.",
)
peer_environments_option = click.option(
    "--peer-environments",
    default=Path(__file__).parent.parent / ".bench",
    show_default=".bench in the repository",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the virtual environments of the peers are, or are made when missing.",
)
