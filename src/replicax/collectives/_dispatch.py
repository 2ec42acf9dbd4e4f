"""The dispatch of programs with collectives, safe for the devices and the other workers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar, final

import jax

from replicax import _context, cluster
from replicax.topology import Topology

Results = TypeVar("Results")  # a nest of arrays


@final
class _Guard:
    """The guard of the order in which programs start, held by the thread that starts one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.previous: list[jax.Array] = []  # what must be ready before the next one starts


_guard = _Guard()


def is_awaited(topology: Topology) -> bool:
    """Return whether a program of all workers is awaited when it is dispatched: on CPUs.

    The loss of a worker then raises at the dispatch, and not wherever the result is first used.
    Accelerators run programs in order, and the loss shows where a result is used.
    """
    return topology.spans_processes and topology.on_cpus


def dispatch(
    topology: Topology, label: str, program: Callable[..., Results], *args: object
) -> Results:
    """Call `program(*args)`, which has collectives over the devices of `topology`.

    XLA:CPU hangs, then aborts the process, when many such programs are in flight on virtual
    devices: 1,000 un-awaited sums on 4 devices do it. Waiting for the previous one first
    costs nothing measurable there. The lock keeps two threads from queueing their programs on the
    devices in different orders. Accelerators queue in order and need none of this.
    """
    tracing = _context.current().program is not None
    if tracing or topology.num_replicas * topology.logical_devices_per_replica == 1:
        return program(*args)
    if topology.spans_processes:
        session = cluster.current()
        session.catch_up()  # It runs programs of its own, so the lock is taken after it.
        with _guard.lock:
            if is_awaited(topology):
                return session.run(label, lambda: jax.block_until_ready(program(*args)))
            return session.run(label, lambda: program(*args))
    if not topology.on_cpus:
        return program(*args)
    with _guard.lock:
        for array in _guard.previous:
            # A failure is for the reader of the result, and a donated result has been awaited.
            with contextlib.suppress(Exception):
                array.block_until_ready()
        outputs = program(*args)
        _guard.previous = jax.tree.leaves(outputs)[-1:]
    return outputs
