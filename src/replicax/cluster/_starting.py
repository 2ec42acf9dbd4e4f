"""The start: a process finds the other workers, and JAX's processes find each other."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax import _jax_compat, _known_bad
from replicax.cluster._members import Address, Members
from replicax.cluster._ports import PortRange, listen_within
from replicax.cluster._relay import Relay
from replicax.errors import StartFailed

NOTICE_SECONDS = 5.0  # after which a waiting worker says what it waits for
_RETRY_SECONDS = 0.1
# JAX's service would end processes that do not report in time; the watchdog judges them instead.
_NO_HEARTBEAT_SECONDS = 10**7
# The caller has a limit of its own, and knows whom to blame; JAX's limit would end the process.
_NO_LIMIT_SECONDS = 10**7
_NO_LIMIT_MINUTES = 10**5

if "TF_CONFIG" in os.environ:  # this is going to be one of several workers
    _jax_compat.note_where_backend_starts()


def require_address(members: Members, worker: int) -> None:
    """Raise `StartFailed` if a worker's address, as this machine resolves it, cannot work.

    A name may stand for a different address on each machine. Debian's /etc/hosts maps the machine's
    own name to 127.0.1.1, where no other machine can reach it.
    """
    address = members.addresses[worker].resolved()
    if address is None:
        return
    if worker == members.index and not _is_of_this_machine(address):
        raise StartFailed(
            f"{members.describe(worker)} is {address}, which is not an address of this machine. "
            "Its task index belongs to another one, or the address is wrong."
        )
    if not _is_loopback(address):
        return
    for other in range(members.count):
        others = members.addresses[other].resolved()
        if others is not None and not _is_loopback(others):
            raise StartFailed(
                f"{members.describe(worker)} is {address} on this machine, where no other machine "
                f"can reach it, and {members.describe(other)} is {others}. Give the cluster "
                "addresses that all machines can reach, or correct the name in /etc/hosts."
            )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _is_of_this_machine(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        try:
            attempt.bind((address, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
    return True


def connect(members: Members, deadline: float, say: Callable[[str], None]) -> socket.socket:
    """Return a connection to the first worker, which may start later than this one."""
    started, notified = time.monotonic(), False
    here = ""
    chief = members.chief.resolved()
    if chief is not None and _is_loopback(chief):
        here = (
            f" {members.chief.host} is this machine: if {members.names[0]} runs on another one, "
            "give the cluster addresses that all machines can reach."
        )
    while True:
        try:
            host = members.chief.resolve()[1]
            return socket.create_connection((host, members.chief.port), timeout=5)
        except OSError as error:
            reason = error
        now = time.monotonic()
        if now > deadline:
            raise StartFailed(
                f"{members.name} could not reach {members.describe(0)} for "
                f"{now - started:.0f} s: {reason}. Is it running, is the address right, and "
                f"does the network let this port through?{here}"
            )
        if not notified and now - started > NOTICE_SECONDS:
            notified = True
            say(f"waits for {members.describe(0)}: {reason}.{here}".removesuffix("."))
        time.sleep(_RETRY_SECONDS)


def join_jax(members: Members, coordinator: str) -> None:
    """Make JAX bring the processes together; wait for all of them, without a timeout."""
    address, bind, relay = coordinator, coordinator, None
    if members.index != 0:
        host, _, port = coordinator.rpartition(":")
        relay = Relay((host.strip("[]"), int(port)))
        address, bind = relay.address, None
    # A worker that leaves must not bring down the others; see `Session` for how they part.
    jax.config.update("jax_enable_recoverability", True)
    # Its handler would take SIGTERM away from the program; see `rx.preemption`.
    jax.config.update("jax_enable_preemption_service", False)
    for what in ("local", "global"):  # 2 and 5 minutes otherwise
        jax.config.update(f"jax_cpu_get_{what}_topology_timeout_minutes", _NO_LIMIT_MINUTES)
    _reach_without_proxy(address)
    _known_bad.set_curing_flags()
    try:
        with _jax_compat.only_errors_logged():
            jax.distributed.initialize(
                coordinator_address=address,
                num_processes=members.count,
                process_id=members.index,
                cluster_detection_method="deactivate",
                initialization_timeout=_NO_LIMIT_SECONDS,
                heartbeat_timeout_seconds=_NO_HEARTBEAT_SECONDS,
                coordinator_bind_address=bind,
            )
    except BaseException:
        if relay is not None:
            relay.close()
        raise


def listen_for_gloo(members: Members, allowed: PortRange | None) -> str | None:
    """Make Gloo listen; return the address, or None if it cannot be determined."""

    def make() -> Any:
        try:
            return _jax_compat.make_cpu_collectives(host)
        except RuntimeError as error:
            raise _cannot_listen(members, error) from None

    try:
        host = members.address.resolve()[1]
    except OSError as error:
        raise _cannot_listen(members, error) from None
    collectives, port = listen_within(make, host, allowed)
    _jax_compat.use_cpu_collectives(collectives)
    _jax_compat.keep_programs_of_all_workers()
    return None if port is None else str(Address(host, port))


def _cannot_listen(members: Members, error: Exception) -> StartFailed:
    return StartFailed(
        f"{members.describe(members.index)} cannot listen there for the collectives of CPUs: "
        f"{error}. In the cluster specification, give it an address of its own machine, at which "
        "the other workers reach it."
    )


def start_backend() -> None:
    """Make JAX look for the devices of all workers: it waits for each to report its own."""
    jax.devices()


def first_collective() -> None:
    """Run a program on all devices, to find out whether they can work together."""
    devices = np.array(jax.devices())
    everywhere = NamedSharding(Mesh(devices, ("device",)), PartitionSpec())
    split = NamedSharding(everywhere.mesh, PartitionSpec("device"))
    ones = [jax.device_put(np.ones(1), device) for device in jax.local_devices()]
    counted = jax.make_array_from_single_device_arrays((len(devices),), split, ones)
    total = jax.jit(jnp.sum, out_shardings=everywhere)
    total(counted).block_until_ready()


def require_fresh_jax() -> None:
    """Raise `StartFailed` if JAX has looked for devices before the workers came together."""
    if jax.distributed.is_initialized():
        raise StartFailed(
            "`jax.distributed.initialize` was called by the program. The strategy does that "
            "itself: leave the call out."
        )
    if not _jax_compat.backends_are_initialized():
        return
    where = _jax_compat.backend_started_at()
    found = f" It was first used here:\n{where}" if where else " "
    raise StartFailed(
        "JAX was used before the workers came together, so that it knows this process's devices "
        f"only.{found}Make the `rx.MultiWorkerMirroredStrategy` first: before arrays, "
        "`jax.devices()`, `jax.random.key` and other strategies."
    )


def _reach_without_proxy(address: str) -> None:
    """Keep gRPC, which JAX's service uses, from going through a web proxy to reach a worker."""
    proxies, exceptions = ("grpc_proxy", "https_proxy", "http_proxy"), "no_grpc_proxy"
    if any(os.environ.get(name) for name in proxies):
        host = address.rpartition(":")[0].strip("[]")
        usual = os.environ.get(exceptions) or os.environ.get("no_proxy")
        os.environ[exceptions] = f"{usual},{host}" if usual else host


def listen(members: Members) -> socket.socket:
    """Return the first worker's listening socket, bound to its address in the cluster only."""
    address = members.chief
    try:
        family, host = address.resolve()
        return socket.create_server((host, address.port), family=family, backlog=members.count)
    except OSError as error:
        raise StartFailed(
            f"{members.describe(0)} cannot listen there: {error}. If the port is in use, choose "
            "another one, or end the process that has it (an earlier run, perhaps)."
        ) from None
