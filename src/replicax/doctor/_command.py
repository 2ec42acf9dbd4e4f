"""The command `replicax doctor`."""

from __future__ import annotations

import click


@click.command("doctor", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--self-test/--no-self-test",
    "with_self_test",
    default=True,
    help="Whether to check the numbers of jaxlib, start two workers on this machine, and measure "
    "their collectives.",
)
@click.pass_context
def doctor_command(context: click.Context, with_self_test: bool) -> None:
    """Look at versions, devices, the cluster and its ports; check numbers, and try two workers.

    The exit code is 1 if there is a problem; the report says what to do about it.
    """
    # Imported here, so that the other commands do not wait 50 ms for `rich`.
    from rich.console import Console

    from replicax.doctor._cluster import find_cluster
    from replicax.doctor._devices import check_devices
    from replicax.doctor._numbers import check_numbers
    from replicax.doctor._ports import check_ports
    from replicax.doctor._report import Report
    from replicax.doctor._self_test import self_test
    from replicax.doctor._versions import check_versions

    report = Report(Console())
    report.section("Versions", check_versions)
    report.section("Devices", check_devices)
    cluster = find_cluster()
    report.section("Cluster", lambda: cluster.checks)
    report.section("Ports", lambda: check_ports(cluster.members, cluster.names_come_later))
    if with_self_test:
        report.section("Numbers: programs that some versions of jaxlib get wrong", check_numbers)
        report.section("Self-test: two workers on this machine's CPU", self_test)
    report.conclude()
    context.exit(1 if report.problems else 0)
