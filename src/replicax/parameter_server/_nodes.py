"""Nodes of Ray: started here, and ended with the process that has started them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from replicax.errors import StartFailed
from replicax.parameter_server import _keeper
from replicax.parameter_server._library import ray

_RAY = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
# A node whose process has ended refuses these checks, and is given up after 2 s. One that is only
# slow, on a busy machine, has ten seconds for each.
_HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "health_check_timeout_ms": 10_000,
}
_STARTED = "Ray runtime started"
_STOPPING_SECONDS = 20.0


@final
class Node:
    """A node of Ray: a process that holds it together, and keeps Ray's own.

    Args:
      options: The options of `ray start`.
    """

    def __init__(self, options: Sequence[str], resources: Mapping[str, float]) -> None:
        ray()  # says what to do if it is not installed
        # Not in `tempfile.gettempdir()`, which may be long: the path of a Unix socket ends at 107.
        self._folder = tempfile.mkdtemp(prefix="rx-", dir="/tmp")
        environment = {
            **os.environ,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        }
        environment.pop("RAY_ADDRESS", None)
        command = [
            *(sys.executable, "-c", _RAY, "start", "--block", "--disable-usage-stats"),
            *("--num-cpus=0", "--num-gpus=0", "--include-log-monitor=false"),
            f"--resources={json.dumps(dict(resources))}",
            *(option.replace("{folder}", self._folder) for option in options),
        ]
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", str(_keeper.__file__), self._folder, *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the owner, which then ends the node
        )

    @classmethod
    def head(cls, host: str, port: int, resources: Mapping[str, float]) -> Node:
        """Start the first node of a cluster."""
        options = [
            *("--head", f"--node-ip-address={host}", f"--port={port}", "--temp-dir={folder}"),
            *("--include-dashboard=false", "--no-monitor"),
            f"--system-config={json.dumps(_HEALTH)}",
        ]
        return cls(options, resources)

    @classmethod
    def member(cls, host: str, head: str, resources: Mapping[str, float]) -> Node:
        """Start a node of the cluster whose first node is at the address `head`."""
        return cls([f"--node-ip-address={host}", f"--address={head}"], resources)

    @property
    def has_ended(self) -> bool:
        return self._keeper.poll() is not None

    def wait(self, seconds: float) -> bool:
        """Wait for the node to end; tell whether it has."""
        try:
            self._keeper.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def has_started(self) -> bool:
        """True if Ray has reported that the node is part of its cluster."""
        try:
            return _STARTED in Path(self._folder, "node.log").read_text(errors="replace")
        except OSError:  # the node has ended
            return False

    def last_words(self) -> str:
        """Return what a node that has ended by itself has printed last."""
        assert self._keeper.stdout is not None
        lines = self._keeper.stdout.read().decode(errors="replace").splitlines()
        return "\n".join(line for line in lines[-30:] if line.strip())

    def stop(self) -> None:
        """End the node and everything that it runs, and wait until it is gone."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        if not self.wait(_STOPPING_SECONDS):
            self._keeper.kill()
            self._keeper.wait()
        assert self._keeper.stdout is not None
        self._keeper.stdout.close()


def await_head(node: Node, host: str, port: int, seconds: float) -> None:
    """Wait until the first node of a cluster accepts connections."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.1)):
        if is_listening(host, port):
            return
        if node.has_ended:
            raise StartFailed(
                f"Ray could not start at {host}:{port}. It printed:\n{node.last_words()}\nIf the "
                "port is in use, choose another one for the chief."
            )
        pause.wait(0.1)
    node.stop()
    raise StartFailed(
        f"Ray did not start at {host}:{port} within {seconds:g} s. If the machine is busy, try "
        "again; `ray start --head` shows whether Ray works here."
    )


def is_listening(host: str, port: int) -> bool:
    """Tell whether a process accepts connections at an address."""
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        return False
    return True


def free_port(host: str) -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return listener.getsockname()[1]
