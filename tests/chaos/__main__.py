"""The command behind `make chaos`: trials until it is stopped, and a table of what held."""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from typing import Any

import click
import rich
import rich.table
from chaos import trials
from chaos.trials import Trial, Tried

import replicax as rx


class Stopped(BaseException):
    """Somebody has asked for the end."""


def table(tried: list[Tried], title: str) -> rich.table.Table:
    """Return how often each thing was tried, how often it held, and how long it took at most."""
    shown = rich.table.Table(title=title)
    shown.add_column("what was tried")
    for column in ("times", "held", "longest"):
        shown.add_column(column, justify="right")
    groups: dict[str, list[Tried]] = defaultdict(list)
    for each in tried:
        groups[each.what].append(each)
    for what, group in sorted(groups.items()):
        held = sum(not each.problems for each in group)
        longest = max(each.seconds for each in group)
        shown.add_row(
            what,
            str(len(group)),
            str(held),
            f"{longest:.1f} s" if longest else "",
            style=None if held == len(group) else "red",
        )
    shown.add_section()
    held = sum(not each.problems for each in tried)
    shown.add_row("all", str(len(tried)), str(held), "")
    return shown


@click.command()
@click.option("--seed", type=int, help="What trials are drawn from.  [default: any]")
@click.option("--seconds", type=float, help="No new trial after so long.  [default: until Ctrl-C]")
@click.option("--trial", type=int, help="This one only.")
def main(seed: int | None, seconds: float | None, trial: int | None) -> None:
    """Try random schedules of failures, damage and resumptions."""

    def stop(*_: Any) -> None:
        raise Stopped

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    rx.config.set_logical_cpu_devices(8)
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    begun, done = time.monotonic(), list[Trial]()
    try:
        for each in trials.run(seed, seconds, trial):
            done.append(each)
            if trial is not None:
                print(each.plan)
            print(each, flush=True)
    except Stopped:
        print("Stopped.", flush=True)
    minutes = (time.monotonic() - begun) / 60
    title = f"{len(done)} trials of seed {seed} in {minutes:.1f} minutes"
    rich.print(table([tried for each in done for tried in each.tried], title))
    failed = [each for each in done if each.problems]
    for each in failed:
        print(f"Failed: {each.again}")
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
