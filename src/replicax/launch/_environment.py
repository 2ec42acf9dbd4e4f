"""The launcher's settings for workers: `TF_CONFIG`, and options of JAX."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

_HOST = "127.0.0.1"


def environments(
    ports: Sequence[int],
    devices_per_worker: int | None = None,
    base: Mapping[str, str] | None = None,
    *,
    compilation_cache: Path | None = None,
) -> list[dict[str, str]]:
    """Return the environment of each worker of a cluster on this machine, one per port.

    >>> first, second = environments([4000, 4001], devices_per_worker=2, base={})
    >>> first["JAX_NUM_CPU_DEVICES"]
    '2'
    >>> print(second["TF_CONFIG"])  # doctest: +NORMALIZE_WHITESPACE
    {"cluster": {"worker": ["127.0.0.1:4000", "127.0.0.1:4001"]},
     "task": {"type": "worker", "index": 1}}
    """
    common = dict(os.environ if base is None else base)
    # JAX reads its options from the environment.
    if devices_per_worker is not None:
        common["JAX_NUM_CPU_DEVICES"] = str(devices_per_worker)
    if compilation_cache is not None:
        common["JAX_COMPILATION_CACHE_DIR"] = str(compilation_cache.absolute())
        common["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        common["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    cluster = {"worker": [f"{_HOST}:{port}" for port in ports]}
    return [
        common
        | {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}})}
        for i in range(len(ports))
    ]


def free_ports(count: int) -> list[int]:
    """Return ports on which no process listens now.

    >>> len(set(free_ports(3)))
    3
    """
    with contextlib.ExitStack() as held:  # all held at the same time, so that they differ
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_HOST, 0))
        return [each.getsockname()[1] for each in sockets]
