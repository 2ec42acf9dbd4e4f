"""Two workers on two addresses, each in a network of its own that a cable connects."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from workers import Workers, running

PROGRAM = "tests/multiprocess/faulty_training.py"
ADDRESSES = ["10.77.0.1", "10.77.0.2"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@pytest.fixture(scope="module")
def networks() -> Iterator[list[str]]:
    """The names of two network namespaces that are connected."""
    if shutil.which("ip") is None:
        pytest.skip("needs `ip` (Debian: iproute2)")
    names = [f"replicax{os.getpid()}{side}" for side in "ab"]
    made: list[str] = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable",
               "netns", names[1])  # fmt: skip
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "cable", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


def training(networks: list[str], *arguments: str):
    addresses = [f"{address}:2222" for address in ADDRESSES]
    return running(
        [PROGRAM, *arguments],
        cluster=[
            {
                "TF_CONFIG": json.dumps(
                    {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
                )
            }
            for index in range(2)
        ],
        prefix=[["ip", "netns", "exec", name] for name in networks],
    )


def wait_for(text: str, group: Workers, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not all(text in group.output(worker) for worker in range(2)):
        assert time.monotonic() < deadline, [group.output(worker) for worker in range(2)]
        time.sleep(0.05)


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


def test_workers_train_and_listen_on_the_named_addresses_only(networks):
    with training(networks, "nothing", "0", "0", "60", "12") as group:
        wait_for("step 1\n", group)
        for worker, process in enumerate(group.processes):
            assert listening(process.pid) <= {ADDRESSES[worker], "127.0.0.1"}
        ended = group.wait(60)
    assert [each.code for each in ended] == [0, 0], [each.output for each in ended]
    weights = [re.search(r"weight \[.*\]", each.output) for each in ended]
    assert weights[0] is not None
    assert weights[1] is not None
    assert weights[0][0] == weights[1][0]


@pytest.mark.slow
def test_a_cut_cable_ends_both(networks):
    with training(networks, "nothing", "0", "0", "120", "100000") as group:
        wait_for("step 2\n", group)
        ip("-n", networks[0], "link", "set", "cable", "down")
        cut = time.time()
        ended = group.wait(70)
        ip("-n", networks[0], "link", "set", "cable", "up")
    for worker, each in enumerate(ended):
        assert each.code == 1, each.output
        assert f"replicax.errors.WorkerLost: worker {1 - worker} " in each.output
        said = re.search(r"^lost at ([\d.]+)$", each.output, re.MULTILINE)
        assert said is not None
        # Long before the time-out: a machine that does not answer is no slow program.
        assert float(said[1]) - cut < 40
