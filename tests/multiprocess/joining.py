"""A worker that stops before a part of its start, until a file is there.

Called with the name of the function before which it stops, the time-out in seconds and the path of
the file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import replicax as rx
from replicax.cluster import _starting


def held(function: Callable[..., Any], gate: Path) -> Callable[..., Any]:
    def wrapped(*arguments: Any) -> Any:
        print("held", file=sys.stderr, flush=True)
        while not gate.exists():
            time.sleep(0.02)
        return function(*arguments)

    return wrapped


if __name__ == "__main__":
    part, timeout_seconds, gate = sys.argv[1:]
    setattr(_starting, part, held(getattr(_starting, part), Path(gate)))
    options = rx.experimental.CommunicationOptions(timeout_seconds=float(timeout_seconds))
    rx.MultiWorkerMirroredStrategy(communication_options=options)
    print("together", flush=True)
