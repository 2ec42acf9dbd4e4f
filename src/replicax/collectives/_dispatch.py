"""Starts programs with collectives, in the way that the devices and the other workers need."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from replicax import _context, cluster
from replicax.topology import Topology

Results = TypeVar("Results")  # a nest of arrays
_lock = threading.Lock()
_previous: list[jax.Array] = []


def is_awaited(topology: Topology) -> bool:
    """Whether programs of all workers are awaited here: on CPUs.

    So the loss of a worker is an exception here, and not wherever the result is first used.
    Accelerators go on in order, and the loss shows where a result is used.
    """
    return topology.spans_processes and topology.on_cpus


def launch(topology: Topology, label: str, program: Callable[..., Results], *args: Any) -> Results:
    """Calls `program(*args)`, which has collectives over the devices of `topology`.

    XLA:CPU stops for ever, then aborts the process, when many such programs are in flight on
    virtual devices: 1,000 un-awaited sums on 4 devices do it. Waiting for the previous one first
    costs nothing measurable there. The lock keeps two threads from queueing their programs on the
    devices in different orders. Accelerators queue in order and need none of this.
    """
    tracing = _context.current().program is not None
    if tracing or topology.num_replicas * topology.logical_devices_per_replica == 1:
        return program(*args)
    if topology.spans_processes:
        run = cluster.current().run
        with _lock:
            if is_awaited(topology):
                return run(label, lambda: jax.block_until_ready(program(*args)))
            return run(label, lambda: program(*args))
    if not topology.on_cpus:
        return program(*args)
    with _lock:
        for array in _previous:
            # A failure belongs to whoever reads the result, and a donated one has been awaited.
            with contextlib.suppress(Exception):
                array.block_until_ready()
        outputs = program(*args)
        _previous[:] = jax.tree.leaves(outputs)[-1:]
    return outputs
