"""Clusters of real processes for tests: a chief, and the programs of workers and servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from workers import free_ports

SECONDS = 240

_SERVER = """
import replicax as rx

task = rx.cluster_resolver.TFConfigClusterResolver()
rx.Server(task.cluster_spec(), job_name=task.task_type, task_index=task.task_id).join()
"""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process: one CPU device, and a token for Ray."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    token = "0123456789abcdef" * 4
    return {**kept, "JAX_PLATFORMS": "cpu", "RAY_AUTH_TOKEN": token, **more}


def run_chief(program: str, **more: str) -> dict:
    """Run the program of a chief, and return the JSON that it prints last."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    # Ray prints lines of its own, some of them in the end.
    result = [line for line in done.stdout.splitlines() if line.startswith("{")][-1]
    return {**json.loads(result), "stderr": done.stderr}


class Servers:
    """The programs of the workers and parameter servers of a cluster; ended with the block."""

    def __init__(self, workers: int, ps: int) -> None:
        ports = iter(free_ports(1 + workers + ps))
        self.cluster = {
            job: [f"127.0.0.1:{next(ports)}" for _ in range(count)]
            for job, count in (("chief", 1), ("worker", workers), ("ps", ps))
        }
        self.processes: dict[tuple[str, int], subprocess.Popen] = {}

    def config(self, job: str, index: int) -> str:
        task = {"type": job, "index": index}
        return json.dumps({"cluster": self.cluster, "task": task})

    def start(self, job: str, index: int) -> None:
        self.processes[job, index] = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            env=environment(TF_CONFIG=self.config(job, index)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> Servers:
        for job in ("worker", "ps"):
            for index in range(len(self.cluster[job])):
                self.start(job, index)
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def processes_of_ray() -> set[int]:
    """Return the processes of Ray on this machine that are alive, by what they are called."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
        except OSError:  # not a process, or one that has just ended
            continue
        if any(word in command for word in (b"/ray/", b"ray::", b"ray.scripts", b"_keeper.py")):
            found.add(int(folder.name))
    return found


def folders_of_ray() -> set[Path]:
    """Return the temporary folders of nodes."""
    return set(Path("/tmp").glob("rx-*"))


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
