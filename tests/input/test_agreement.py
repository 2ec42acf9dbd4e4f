"""Agreement on the input of several workers, with the other one made up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import replicax as rx
from replicax.input import _agreement
from replicax.input._agreement import AgreeingFeed, InTurn, OfferingFeed
from replicax.input._ending import EndOfData
from replicax.input._feed import SplittingFeed
from replicax.input._prefetch import PrefetchedProducer
from replicax.input._row_splitting import Workers
from replicax.input.sources import source_of


class Network:
    """A worker's session, with another worker that says the same, or what it is told to.

    Its answer is never there before it is waited for, unless the network is `near`.
    """

    def __init__(self, near: bool = False) -> None:
        self.members = SimpleNamespace(count=2, names=["worker 0", "worker 1"])
        self.near = near
        self.told: list[Any] = []
        self.under_way: dict[str, Any] = {}
        self.answers: dict[int, Any] = {}

    def put_input(self, topic: str, value: Any) -> Any:
        assert topic == f"pass/{len(self.told)}"
        self.told.append(value)
        self.under_way[topic] = [value, self.answers.get(len(self.told) - 1, value)]
        return SimpleNamespace(
            topic=topic, complete=self.near, withdraw=lambda: self.under_way.pop(topic)
        )

    def wait_for_input(self, exchange: Any, closed: threading.Event) -> list[Any]:
        return self.under_way.pop(exchange.topic)


def feed_of(network: Network, source: Any, offers: Any = InTurn) -> AgreeingFeed:
    workers = Workers(replicas=2, local=(0,), count=2, index=0)
    session: Any = network
    offering = OfferingFeed(
        lambda: SplittingFeed(source_of(source), workers, False), 1, session, "pass"
    )
    return AgreeingFeed(offering, offers(offering), 1, session, threading.Event())


def batches(count: int, rows: int = 2) -> Any:
    return rx.from_tensor_slices(np.arange(count * rows)).batch(rows)


def rows_of(step: Any) -> list[Any]:
    return [part.tolist() for part in step.columns()[0]]


def test_steps_that_are_waited_for_are_offered_further_ahead():
    network = Network()
    feed = feed_of(network, batches(500))
    under_way = []
    for number in range(200):
        assert rows_of(feed.step()) == [[2 * number]]
        under_way.append(len(network.under_way))
    assert under_way[:7] == [2, 4, 8, 16, 32, 64, 64]
    assert max(under_way) == 64
    feed.close()
    assert not network.under_way


def test_steps_that_need_no_waiting_are_not_read_ahead():
    network = Network(near=True)
    feed = feed_of(network, batches(9))
    assert [rows_of(feed.step()) for _ in range(9)] == [[[2 * number]] for number in range(9)]
    assert not network.under_way


def test_large_steps_are_not_read_far_ahead(monkeypatch):
    monkeypatch.setattr(_agreement, "_MOST_BYTES", 5 * 8)
    network = Network()
    feed = feed_of(network, batches(50))
    for _ in range(20):
        feed.step()
        assert len(network.under_way) <= 10  # of one number each, 4 bytes of it or 8


def test_what_is_the_same_is_told_once():
    network = Network(near=True)
    feed = feed_of(network, batches(4))
    steps = [feed.step() for _ in range(4)]
    with pytest.raises(EndOfData):
        feed.step()
    assert [offer is None for offer in network.told] == [False, True, True, True, False]
    assert [step.shapes for step in steps] == [[((1,), (1,))]] * 4


def test_a_failure_is_told_after_the_steps_before_it():
    def breaks():
        yield from (np.arange(2) for _ in range(3))
        raise OSError("the disk is gone")

    network = Network()
    feed = feed_of(network, breaks)
    for _ in range(3):
        feed.step()
    assert network.told[3:] == [{"failure": "OSError: the disk is gone"}]
    with pytest.raises(OSError, match="the disk is gone"):
        feed.step()


def test_the_failure_of_another_comes_at_its_step():
    network = Network()
    network.answers[5] = {"failure": "OSError: the disk is gone"}
    feed = feed_of(network, batches(50))
    for number in range(5):
        assert rows_of(feed.step()) == [[2 * number]]
    with pytest.raises(rx.errors.InputFailed, match=r"worker 1 failed: OSError: the disk is gone"):
        feed.step()
    feed.close()
    assert not network.under_way


def test_a_state_is_that_after_the_step_however_much_was_read():
    network = Network()
    feed = feed_of(network, batches(50))
    states = [feed.step().state for _ in range(10)]
    near = feed_of(Network(near=True), batches(50))
    assert states == [near.step().state for _ in range(10)]


def test_a_source_that_waits_for_its_consumer_gets_what_it_waits_for():
    """It is read in a thread of its own, so that a step does not wait for the one behind it."""
    network, used = Network(), threading.Semaphore(0)

    def interactive():
        for number in range(4):
            yield np.full(2, number)
            assert used.acquire(timeout=20)

    def threaded(offering: OfferingFeed) -> PrefetchedProducer:
        return PrefetchedProducer(lambda: offering, lambda offered: offered)

    feed = feed_of(network, interactive, threaded)
    for number in range(4):
        assert rows_of(feed.step()) == [[number]]
        used.release()
    feed.close()
