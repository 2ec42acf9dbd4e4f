"""Whom a worker reaches: ports that accept, refuse, and do not answer."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from in_memory_cluster import members

from replicax.cluster._members import Address
from replicax.cluster._messages import Unreached
from replicax.cluster._reach import Reach, unreached

HOST = "127.0.0.1"


def address_of(listener: socket.socket) -> Address:
    return Address(HOST, listener.getsockname()[1])


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        yield listener


@pytest.fixture
def silent() -> Iterator[Address]:
    """A port that does not answer, because nobody accepts those who have come already."""
    with socket.create_server((HOST, 0), backlog=0) as listener:
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex((HOST, listener.getsockname()[1]))
        yield address_of(listener)
        for each in waiting:
            each.close()


def test_those_who_accept_are_reached(listener):
    assert unreached({1: address_of(listener), 2: address_of(listener)}, 5) == ()
    assert unreached({}, 5) == ()


def test_those_who_refuse_are_not():
    with socket.socket() as free:
        free.bind((HOST, 0))
        address = address_of(free)
        assert unreached({3: address}, 5) == (Unreached(3, str(address), "Connection refused"),)


def test_all_are_tried_at_once_and_not_for_ever(listener, silent):
    started = time.monotonic()
    found = unreached({1: silent, 2: address_of(listener), 3: silent}, 1)
    assert time.monotonic() - started < 5
    reason = "no answer for 1 s"
    assert found == (Unreached(1, str(silent), reason), Unreached(3, str(silent), reason))


def test_a_name_that_means_nothing_is_said():
    (failure,) = unreached({1: Address("nowhere.invalid", 1)}, 1)
    assert failure.address == "nowhere.invalid:1"
    assert failure.reason


def test_a_worker_looks_at_the_others_whose_ports_it_knows(listener):
    reach = Reach(members(3, index=1), timeout_seconds=2)
    assert reach.look() == ()
    with socket.socket() as free:
        free.bind((HOST, 0))
        reach.learn([str(address_of(listener)), "127.0.0.1:1", str(address_of(free))])
        (failure,) = reach.look()
    assert failure.worker == 2
    reach.learn([str(address_of(listener)), None, None])
    assert reach.look() == ()


def test_a_look_is_shorter_than_what_others_wait_for_it():
    assert Reach(members(2), timeout_seconds=4).seconds == 2
    assert Reach(members(2), timeout_seconds=300).seconds == 10


def test_messages_name_both_ends():
    reach = Reach(members(9), timeout_seconds=60)
    failures = [(0, Unreached(other, f"10.0.0.1:{other}", "no answer")) for other in range(1, 9)]
    first, *_, last = reach.describe(failures).split("; ")
    assert first == "worker 0 (10.0.0.1:1000) cannot reach worker 1's port 10.0.0.1:1 (no answer)"
    assert last == "and 2 more"
