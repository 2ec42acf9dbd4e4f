"""The number of round trips between hosts for each thing that workers do together.

`python benchmarks/round_trips.py` prints this table. The hosts are network namespaces, and the
switch between them delays packets (`tests/hosts.py`), which needs root.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import click
import numpy as np
from report import WIDTH, announce, describe_machine, table_of
from rich.console import Console

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # it has another `workers` than benchmarks
from hosts import hosts  # noqa: E402

PROGRAM = ROOT / "benchmarks" / "contestants" / "round_trips.py"
LIMIT_SECONDS = 300
NAMES = {
    "create": "creating a variable",
    "adam": "the first step of Adam, per variable",
    "step": "a compiled step",
    "reduced": "the same, with its loss reduced by `strategy.reduce`",
    "summed inside": "the same, with its loss summed by `all_reduce` in the step",
    "fed": "a compiled step without a collective, fed by a dataset",
    "uneven": "a compiled step with uneven shares",
    "eager": "an eager step with uneven shares",
    "eager, reduced": "the same, with its loss reduced",
}


def measure(count: int, round_trips_ms: list[float], source: Path) -> dict[str, list[float]]:
    """Return the milliseconds of each thing, for each round-trip time, among so many hosts."""
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    with tempfile.TemporaryDirectory() as folder, hosts(count) as network:
        arguments = [str(PROGRAM), folder, str(len(round_trips_ms))]
        with network.run(arguments, PYTHONPATH=str(source)) as group:
            for number, round_trip in enumerate(round_trips_ms):
                group.wait_for(f"ready {number}\n", LIMIT_SECONDS)
                announce(f"{count} hosts, round trip {round_trip:g} ms")
                network.rules.delay_ms = round_trip / 2
                (Path(folder) / str(number)).touch()
            ended = group.wait(LIMIT_SECONDS)
    if any(each.code for each in ended):
        raise click.ClickException("\n".join(each.output for each in ended))
    for line in ended[0].output.splitlines():
        if line.startswith("{"):
            for name, seconds in json.loads(line).items():
                times[name].append(1000 * seconds)
    return times


@click.command()
@click.option("--hosts", "counts", default=(2, 3), multiple=True, type=click.IntRange(min=2))
@click.option("--round-trip", "round_trips_ms", default=(0.0, 20.0, 40.0), multiple=True)
@click.option("--source", default=ROOT / "src", type=click.Path(path_type=Path, exists=True))
def main(counts: tuple[int, ...], round_trips_ms: tuple[float, ...], source: Path) -> None:
    """Fit times to the round trip between hosts (ms); `--source` measures another replicax."""
    console = Console(width=WIDTH)
    console.print(describe_machine(), highlight=False)
    for count in counts:
        times = measure(count, list(round_trips_ms), source.resolve())
        table = table_of(
            f"{count} hosts",
            "what",
            *(f"{round_trip:g} ms" for round_trip in round_trips_ms),
            "round trips",
            words=("what",),
        )
        for name, label in NAMES.items():
            slope, _ = np.polyfit(round_trips_ms, times[name], 1)
            each = [f"{milliseconds:.1f}" for milliseconds in times[name]]
            table.add_row(label, *each, f"{slope:.1f}")
        console.print(table)


if __name__ == "__main__":
    main()
