"""Real workers: processes on 127.0.0.1 that know of each other by TF_CONFIG."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replicax.launch import environments, free_ports

ROOT = Path(__file__).parents[1]


@dataclass
class Ended:
    """The end of a worker: its exit code, its output, and the time in seconds since the start."""

    code: int | None
    output: str
    seconds: float


class Workers:
    """Running processes; `wait` for them."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], outputs: Sequence[Path]):
        self.processes = processes
        self.outputs = outputs
        self._started = time.monotonic()

    def output(self, worker: int) -> str:
        return self.outputs[worker].read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Wait until all have written a text."""
        deadline = time.monotonic() + seconds
        everyone = range(len(self.processes))
        while not all(text in self.output(worker) for worker in everyone):
            assert time.monotonic() < deadline, [self.output(worker) for worker in everyone]
            time.sleep(0.05)

    def wait(self, seconds: float, but: int | None = None) -> list[Ended]:
        """Wait until all (`but` one) have ended or time is up; kill the rest, which get no code."""
        deadline = time.monotonic() + seconds
        ended: dict[int, float] = {}
        awaited = set(range(len(self.processes))) - {but}
        while not awaited <= ended.keys() and time.monotonic() < deadline:
            for worker, process in enumerate(self.processes):
                if worker not in ended and process.poll() is not None:
                    ended[worker] = time.monotonic() - self._started
            time.sleep(0.02)
        self.kill()
        return [
            Ended(
                process.returncode if worker in ended else None,
                self.output(worker),
                ended.get(worker, seconds),
            )
            for worker, process in enumerate(self.processes)
        ]

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(10)


@contextlib.contextmanager
def running(
    arguments: Sequence[str],
    *,
    workers: int = 2,
    devices: int = 1,
    cluster: Sequence[Mapping[str, str]] | None = None,
    prefix: Sequence[Sequence[str]] | None = None,
) -> Iterator[Workers]:
    """Start Python with `arguments` once per worker.

    `cluster` has other environments than usual, and `prefix` a command to start each worker with.
    """
    base = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "XLA_FLAGS")}
    base["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    told = cluster or environments(free_ports(workers), devices, base)
    with tempfile.TemporaryDirectory() as directory:
        outputs = [Path(directory) / f"{worker}.log" for worker in range(len(told))]
        processes = []
        try:
            for worker, (environment, output) in enumerate(zip(told, outputs, strict=True)):
                before = list(prefix[worker]) if prefix else []
                with output.open("wb") as file:
                    processes.append(
                        subprocess.Popen(
                            [*before, sys.executable, "-u", *arguments],
                            env={**base, **environment},
                            cwd=ROOT,
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=subprocess.STDOUT,
                        )
                    )
            group = Workers(processes, outputs)
            yield group
        finally:
            Workers(processes, outputs).kill()


def run(
    arguments: Sequence[str], seconds: float = 120, but: int | None = None, **options: object
) -> list[Ended]:
    """Start workers, and wait until they have ended, `but` one."""
    with running(arguments, **options) as group:  # type: ignore[arg-type]
        return group.wait(seconds, but)


def message_of(kind: type[Exception], function: Callable[[], Any]) -> str:
    """Return the message of an error that must be raised; for what workers report."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")
