"""Workers on hosts of their own, and what may happen to the network between them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hosts import PORT, Hosts, hosts
from workers import Ended

PROGRAM = "tests/multiprocess/faulty_training.py"
TIMEOUT = 5.0
# What workers need to start, on two busy cores.
START = 60.0


def training(network: Hosts, steps: int, timeout: float = TIMEOUT, **environment: str):
    arguments = [PROGRAM, "nothing", "0", "0", str(timeout), str(steps)]
    return network.run(arguments, **environment)


def require_trained(ended: list[Ended]) -> None:
    assert [each.code for each in ended] == [0] * len(ended), [each.output for each in ended]
    weights = [re.findall(r"weight \[.*\]", each.output) for each in ended]
    assert len(weights[0]) == 1
    assert weights == [weights[0]] * len(ended)


def require_failed(ended: list[Ended], error: str, *patterns: str) -> None:
    """All have ended by an exception of this kind, never by a signal, and name the culprits."""
    for each in ended:
        assert each.code == 1, each.output
        assert f"replicax.errors.{error}: " in each.output
        for pattern in patterns:
            assert re.search(pattern, each.output), each.output


def cannot_reach(worker: int, other: int) -> str:
    """A pattern of what is said of a worker that does not reach another one's port."""
    described = rf"worker {worker} \(10\.77\.0\.{worker + 1}:{PORT}\)"
    return rf"{described} cannot reach worker {other}'s port 10\.77\.0\.{other + 1}:\d+ \(no answer"


def listening(process: int) -> set[str]:
    """The addresses on which a network namespace is listened, by what the kernel says."""
    found = set()
    for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == "0A":
            octets = bytes.fromhex(local.partition(":")[0])[::-1]
            found.add(".".join(str(octet) for octet in octets))
    for line in Path(f"/proc/{process}/net/tcp6").read_text().splitlines()[1:]:
        _, local, _, state, *_ = line.split()
        if state == "0A":
            words = local.partition(":")[0]
            assert words[:24] == "0000000000000000FFFF0000", f"not an IPv4 address: {words}"
            octets = bytes.fromhex(words[24:])[::-1]
            found.add(".".join(str(octet) for octet in octets))
    return found


def test_workers_train_and_listen_on_the_named_addresses_only():
    with hosts(2) as network, training(network, 12, timeout=60) as group:
        group.wait_for("step 1\n")
        for worker, process in enumerate(group.processes):
            assert listening(process.pid) <= {network.addresses[worker], "127.0.0.1"}
        require_trained(group.wait(START))


@pytest.mark.slow
def test_a_slow_network_that_loses_packets_is_no_failure():
    with hosts(3) as network:
        network.rules.delay_ms, network.rules.jitter_ms, network.rules.loss = 20, 10, 0.03
        with training(network, 5, timeout=30) as group:
            require_trained(group.wait(3 * START))


@pytest.mark.slow
def test_a_cut_cable_ends_both():
    with hosts(2) as network, training(network, 100_000, timeout=120) as group:
        group.wait_for("step 2\n")
        network.rules.cut_pair(0, 1)
        cut = time.time()
        ended = group.wait(70)
    for worker, each in enumerate(ended):
        assert each.code == 1, each.output
        lost = (
            rf"replicax\.errors\.WorkerLost: worker {1 - worker} \(.*\) cannot be reached any more"
        )
        assert re.search(lost, each.output), each.output
        assert "killed" not in each.output
        said = re.search(r"^lost at ([\d.]+)$", each.output, re.MULTILINE)
        assert said is not None
        # Long before the time-out: a machine that does not answer is no slow program.
        assert float(said[1]) - cut < 40


def test_a_host_that_is_cut_off_from_the_start_is_named():
    with hosts(3) as network:
        network.rules.cut_hosts.add(1)
        with training(network, 1) as group:
            ended = group.wait(START + TIMEOUT)
    require_failed([ended[0], ended[2]], "StartFailed", r"waits for worker 1 \(10.77.0.2:2222\)")
    require_failed([ended[1]], "StartFailed", r"not reach worker 0 \(10.77.0.1:2222\)")


# Workers that reach the first one, and not each other.


def test_two_workers_that_do_not_reach_each_other_are_named_before_they_wait():
    with hosts(3) as network:
        network.rules.cut_pair(1, 2)
        with training(network, 1) as group:
            ended = group.wait(START + TIMEOUT)
    require_failed(ended, "StartFailed", cannot_reach(1, 2), cannot_reach(2, 1), "REPLICAX_PORTS")


def test_two_workers_that_do_not_reach_each_other_any_more_are_named():
    with hosts(3) as network, training(network, 100_000) as group:
        group.wait_for("step 2\n")
        network.rules.cut_pair(1, 2)
        ended = group.wait(6 * TIMEOUT)
    require_failed(ended, "WorkerLost", cannot_reach(1, 2), cannot_reach(2, 1))


# Workers that were told different things.


def test_a_host_that_was_told_of_another_cluster_is_named_to_all():
    with hosts(3) as network:
        right = network.addresses
        told = [right, right, [right[0], "10.77.0.9", right[2]]]
        with network.run([PROGRAM, "nothing", "0", "0", "200", "1"], told) as group:
            ended = group.wait(START)  # long before the time-out
    came = r"came as worker 2 \(10\.77\.0\.3:2222\) was refused: it has the cluster \["
    require_failed(ended[:2], "StartFailed", came)
    require_failed(ended[2:], "StartFailed", "was turned away")


def test_a_name_that_is_a_loopback_address_on_its_own_host():
    right = {"first": "10.77.0.1", "second": "10.77.0.2"}
    with hosts(2, [right, {**right, "second": "127.0.1.1"}]) as network:
        told = [list(right)] * 2
        with network.run([PROGRAM, "nothing", "0", "0", "200", "1"], told) as group:
            ended = group.wait(START)
    trap = r"second.*is 127\.0\.1\.1 on this machine, where no other machine can reach it"
    require_failed(ended[1:], "StartFailed", trap)
    # Worker 0 hears of it while it waits for the others, or right after they have all come.
    assert ended[0].code == 1, ended[0].output
    assert re.search(rf"errors\.(StartFailed|WorkerLost): .*{trap}", ended[0].output)


def test_hosts_that_are_far_apart_wait_for_each_other_once_for_many_variables():
    with hosts(2) as network:
        network.rules.delay_ms = 50
        with network.run(["tests/multiprocess/scenarios.py", "many_beginnings"]) as group:
            ended = group.wait(2 * START)
    assert [each.code for each in ended] == [0, 0], [each.output for each in ended]
    for each in ended:
        (line,) = re.findall(r"^RESULT (.*)$", each.output, re.MULTILINE)
        _, result = json.loads(line)
        assert result["few"][0] == result["many"][0], "what is done together"


# Firewalls.


def test_the_port_of_jax_is_closed():
    with hosts(2) as network:
        network.rules.open_ports[0] = {PORT}
        with training(network, 1) as group:
            ended = group.wait(START + TIMEOUT)
    require_failed(ended, "StartFailed", cannot_reach(1, 0))


def test_the_port_of_gloo_is_closed():
    with hosts(3) as network:
        network.rules.open_ports[2] = {PORT}
        with training(network, 1) as group:
            ended = group.wait(START + TIMEOUT)
    require_failed(ended, "StartFailed", cannot_reach(0, 2), cannot_reach(1, 2))


def test_ports_can_be_chosen():
    with hosts(2) as network:
        network.rules.open_ports = {host: {PORT, *range(40000, 40020)} for host in range(2)}
        with training(network, 3, timeout=30, REPLICAX_PORTS="40000-40019") as group:
            require_trained(group.wait(START))


# A cut while the workers join.


@pytest.mark.parametrize(
    ("part", "label", "cut"),
    [
        ("join_jax", "joining JAX's service", "host"),
        pytest.param(
            "listen_for_gloo", "telling the ports of Gloo", "host", marks=pytest.mark.slow
        ),
        ("start_backend", "starting JAX's backend", "host"),
        pytest.param("first_collective", "the first collective", "host", marks=pytest.mark.slow),
        ("first_collective", "the first collective", "pair"),
    ],
)
def test_a_cut_while_the_workers_join(tmp_path, part, label, cut):
    gate = tmp_path / "gate"
    arguments = ["tests/multiprocess/joining.py", part, str(TIMEOUT), str(gate)]
    with hosts(3) as network, network.run(arguments) as group:
        group.wait_for("held")
        if cut == "host":
            network.rules.cut_hosts.add(1)
        else:
            network.rules.cut_pair(1, 2)
        gate.touch()
        ended = group.wait(START)
    if cut == "pair":
        require_failed(ended, "WorkerLost", label, cannot_reach(1, 2), cannot_reach(2, 1))
    else:
        require_failed([ended[0], ended[2]], "WorkerLost", label, r"worker 1 \(10.77.0.2:2222\)")
        require_failed([ended[1]], "WorkerLost", label, r"worker 0 \(10.77.0.1:2222\)")
