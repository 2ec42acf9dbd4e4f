"""From the first connection to the first collective: how JAX's processes find each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from replicax.cluster import _starting as starting
from replicax.cluster._members import Members
from replicax.cluster._messages import Unreached
from replicax.cluster._ports import PORTS_VARIABLE, PortRange, ReservedPort
from replicax.cluster._quiet import without_lines
from replicax.cluster._reach import Reach
from replicax.errors import StartFailed


class Meet(Protocol):
    """A meeting of all workers, such as `Session.meet`."""

    def __call__(self, label: str, value: Any) -> list[Any]: ...


def bring_together(
    members: Members,
    coordinator: str,
    reserved: ReservedPort | None,
    allowed: PortRange | None,
    reach: Reach,
    meet: Meet,
    run: Callable[[str, Callable[[], Any]], None],
) -> None:
    """Have JAX's processes find each other, after it is known that they can.

    XLA waits for connections for as long as it likes and ends the process if there are none, so
    every port is tried first, and whoever does not reach one is named on all workers.

    Args:
      members: Who takes part.
      coordinator: The address of JAX's service.
      reserved: That port, in the process whose it is.
      allowed: The ports that this process may use; None for any.
      reach: Finds out whom this worker reaches.
      meet: Exchanges a value with all workers.
      run: Runs a program that waits for other workers, and watches it.
    """
    reach.learn([coordinator])
    _require_reach(reach, meet, "trying the port of JAX's service")
    if reserved is not None:
        reserved.stop_listening()
    run("joining JAX's service", lambda: starting.join_jax(members, coordinator))
    reach.learn(meet("telling the ports of Gloo", starting.listen_for_gloo(members, allowed)))
    _require_reach(reach, meet, "trying the ports of Gloo")
    run("starting JAX's backend", starting.start_backend)
    with without_lines(b"[Gloo] Rank"):
        run("the first collective", starting.first_collective)


def _require_reach(reach: Reach, meet: Meet, label: str) -> None:
    """Raise `StartFailed` on all workers if one of them does not reach another."""
    seen = meet(label, [asdict(failure) for failure in reach.look()])
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
