"""The steps from the first connection to the first collective: JAX's processes find each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from replicax.cluster import _starting as starting
from replicax.cluster._members import Members
from replicax.cluster._messages import Unreached
from replicax.cluster._ports import PORTS_VARIABLE, PortRange, ReservedPort
from replicax.cluster._reach import Reach
from replicax.cluster._stdout_filter import without_lines
from replicax.errors import StartFailed

if TYPE_CHECKING:
    from replicax._typing import Json


class AllGather(Protocol):
    """A function that returns the values of all workers, such as `Session.all_gather`."""

    def __call__(self, label: str, value: object) -> list[Json]: ...


def bring_together(
    members: Members,
    coordinator: str,
    reserved: ReservedPort | None,
    allowed: PortRange | None,
    reach: Reach,
    all_gather: AllGather,
    run: Callable[[str, Callable[[], object]], None],
) -> None:
    """Make JAX's processes find each other, after checking that they can.

    XLA waits for connections for an unknown time, and ends the process if there are none. So every
    port is tried first, and a worker that cannot reach one is named on all workers.

    Args:
      members: The processes that take part.
      coordinator: The address of JAX's service.
      reserved: The reservation of that port, in the process that owns it.
      allowed: The ports that this process may use; None for any.
      reach: Finds out which workers this one can reach.
      all_gather: Returns the values of all workers.
      run: Runs a program that waits for other workers, and watches it.
    """
    reach.learn([coordinator])
    _require_reach(reach, all_gather, "trying the port of JAX's service")
    if reserved is not None:
        reserved.stop_listening()
    run("joining JAX's service", lambda: starting.join_jax(members, coordinator))
    reach.learn(all_gather("telling the ports of Gloo", starting.listen_for_gloo(members, allowed)))
    _require_reach(reach, all_gather, "trying the ports of Gloo")
    run("starting JAX's backend", starting.start_backend)
    with without_lines(b"[Gloo] Rank"):
        run("the first collective", starting.first_collective)


def _require_reach(reach: Reach, all_gather: AllGather, label: str) -> None:
    """Raise `StartFailed` on all workers if one of them cannot reach another."""
    seen = all_gather(label, [asdict(failure) for failure in reach.look()])
    failures = [
        (worker, Unreached(**failure))
        for worker, failures in enumerate(seen)
        for failure in failures
    ]
    if failures:
        raise StartFailed(
            f"Some workers do not reach each other: {reach.describe(failures)}. They need more "
            "ports than that of the cluster specification: let them through, or choose them by "
            f"{PORTS_VARIABLE}; see docs/clusters.md#ports-and-firewalls."
        )
