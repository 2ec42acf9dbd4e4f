"""Links of several workers to a hub in the same process."""

from __future__ import annotations

import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from in_memory_cluster import InMemoryCluster, InMemoryConnection, members, nothing

from replicax.cluster import _messages
from replicax.cluster._hub import Hub
from replicax.cluster._link import Link
from replicax.cluster._messages import Failed, Finished, TakeLeave
from replicax.errors import InvalidArgument, StartFailed, WorkerLost


@pytest.fixture
def two():
    with InMemoryCluster(2) as cluster:
        yield cluster


@pytest.fixture
def threads():
    with ThreadPoolExecutor() as pool:
        yield pool


def test_all_are_welcomed(two):
    assert [link.wait_for_welcome(5) for link in two.links] == ["10.0.0.1:999"] * 2


def test_one_that_is_not_complete_gets_no_address():
    connection = InMemoryConnection(Hub(members(2), "10.0.0.1:999"), threading.Lock())
    link = Link(connection, members(2))
    assert link.wait_for_welcome(0.01) is None
    state = link.state(5)
    assert state is not None
    assert state.absent == (1,)
    connection.close()


def test_a_stranger_is_told_why_it_was_turned_away():
    hub = Hub(members(2), "10.0.0.1:999")
    connection = InMemoryConnection(hub, threading.Lock())
    link = Link(connection, members(3, 2))
    with pytest.raises(StartFailed, match=r"worker 2 \(.*was turned away.*the same cluster"):
        link.wait_for_welcome(5)
    connection.close()


def test_those_who_wait_are_told_of_a_stranger_once():
    hub, lock = Hub(members(2), "10.0.0.1:999"), threading.Lock()
    connection = InMemoryConnection(hub, lock)
    link = Link(connection, members(2))
    stranger = InMemoryConnection(hub, lock)
    stranger.send(_messages.Hello(1, ("a:1", "b:1"), _messages.versions()))
    assert link.wait_for_welcome(5) is None
    assert link.turned_away is not None
    assert link.turned_away.startswith("A process that came as worker 1 (10.0.0.1:1001) was refus")
    begun = time.monotonic()
    assert link.wait_for_welcome(0.01, link.turned_away) is None
    assert time.monotonic() - begun >= 0.01
    connection.close()


def test_a_first_worker_that_cannot_be_reached_is_not_called_killed():
    class Cut(InMemoryConnection):
        def receive(self) -> _messages.Message | None:
            raise OSError(errno.ETIMEDOUT, "Connection timed out")

    connection = Cut(Hub(members(2), "10.0.0.1:999"), threading.Lock())
    link = Link(connection, members(2, 1))
    assert link.wait_for_loss(5) == 0
    assert "cannot be reached any more (Connection timed out)" in link.explain(0)
    assert "killed" not in link.explain(0)


def test_one_that_fails_at_the_start_is_named(two):
    two.links[1].say_farewell(Failed("failed: ImportError", secondary=False), 5)
    assert two.links[0].wait_for_loss(5) == 1
    with pytest.raises(StartFailed, match=r"came together, worker 1 \(.*failed: ImportError"):
        two.links[0].wait_for_welcome(5)


@pytest.mark.parametrize("value", [None, 3, [1.5, float("inf")], {"a": "ü\n"}, "x" * 1_000_000])
def test_everybody_gets_the_values_of_all_in_their_order(two, threads, value):
    first = threads.submit(two.links[0].exchange, "topic", "a test", [0, value], nothing)
    second = threads.submit(two.links[1].exchange, "topic", "a test", [1, value], nothing)
    assert first.result(5) == second.result(5) == [[0, value], [1, value]]


def test_a_worker_may_have_several_exchanges_under_way(two):
    first, second = two.links
    ahead = [first.put(f"topic {number}", "a test", number) for number in range(3)]
    assert not any(exchange.complete for exchange in ahead)
    answers = [second.put(f"topic {number}", "a test", -number) for number in range(2)]
    assert [exchange.wait(nothing) for exchange in answers] == [[0, 0], [1, -1]]
    assert [exchange.wait(nothing) for exchange in ahead[:2]] == [[0, 0], [1, -1]]
    ahead[2].withdraw()
    state = second.state(5)
    assert state is not None
    assert state.missing == {}


def test_an_exchange_with_one_that_is_lost_fails_when_it_is_waited_for(two):
    first, second = two.links
    done, vain = (first.put(topic, "a test", 1) for topic in ("done", "vain"))
    second.exchange("done", "a test", 2, nothing)
    two.connections[1].close("was killed")
    assert first.wait_for_loss(5) == 1
    assert done.wait(nothing) == [1, 2]
    with pytest.raises(WorkerLost, match=r"worker 1 \(.*\) was killed"):
        vain.wait(nothing)


@pytest.mark.parametrize("worker", [0, 1])
def test_one_that_is_lost_while_it_is_waited_for_is_named(two, threads, worker):
    survivor = two.links[1 - worker]
    waiting = threads.submit(survivor.exchange, "topic", "a test", 1, nothing)
    two.connections[worker].close("was killed")
    with pytest.raises(WorkerLost, match=rf"worker {worker} \(.*\) was killed"):
        waiting.result(5)


def test_a_hub_that_is_gone_takes_the_first_worker_along(two, threads):
    waiting = threads.submit(two.links[1].exchange, "topic", "a test", 1, nothing)
    two.connections[1].close()
    with pytest.raises(WorkerLost, match=r"worker 0 .* exited without reporting an error"):
        waiting.result(5)


@pytest.mark.parametrize("worker", [0, 1])
def test_a_value_that_is_too_large_is_refused_before_it_is_sent(two, threads, worker, monkeypatch):
    monkeypatch.setattr(_messages, "LARGEST_PUT", 10_000)  # 16 MB take a second or two
    link = two.links[worker]
    with pytest.raises(
        InvalidArgument, match=r"for a test \(topic\) is too large: .*17,\d"
    ) as error:
        link.exchange("topic", "a test", ["x" * 17_000], nothing)
    assert f"The message of worker {worker} for" in str(error.value)
    assert len(str(error.value)) < 400
    # Nobody is lost by it.
    large = "x" * 9_900
    both = [threads.submit(each.exchange, "next", "a test", large, nothing) for each in two.links]
    assert [each.result(10) == [large, large] for each in both] == [True, True]


def test_a_first_worker_that_loses_its_own_hub_says_so(two):
    two.connections[0].close()
    with pytest.raises(WorkerLost, match=r"worker 0 \(.*\) has lost the hub in its own process"):
        two.links[0].exchange("topic", "a test", 1, nothing)
    assert two.links[0].wait_until_ended({1}, 5)  # and does not wait for the others
    assert not two.links[0].all_finished


def test_what_check_raises_ends_the_waiting(two):
    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        two.links[0].exchange("topic", "a test", 1, check)
    state = two.links[1].state(5)
    assert state is not None
    assert state.missing == {}  # it was withdrawn


def test_who_has_finished_and_who_has_left(two):
    first, second = two.links
    second.send(Finished(12))
    assert first.wait_until_ended({1}, 5)
    assert first.all_finished
    assert first.ended[1].finished_after == 12
    assert first.wait_for_loss(5) == 1
    second.send(TakeLeave())
    first.wait_until_left({1}, 5)


def test_a_failure_ends_the_waiting_for_the_end(two):
    first, second = two.links
    second.say_farewell(Failed("failed: ValueError", secondary=False), 5)
    assert first.wait_until_ended({1}, 5)
    assert not first.all_finished
    assert first.explain(1) == "worker 1 (10.0.0.1:1001) failed: ValueError."


def waits_for_the_cause(link: Link) -> bool:
    begun = time.monotonic()
    link.wait_until_cause_is_gone(0.05)
    return time.monotonic() - begun >= 0.05


def test_who_follows_one_that_was_lost_waits_until_its_process_is_gone(two):
    first, second = two.links
    second.send(Finished(2))
    assert first.wait_until_ended({1}, 5)
    loss = str(first.loss(1, " It is needed."))
    assert loss == "worker 1 (10.0.0.1:1001) has finished its program. It is needed."
    first.say_farewell(Failed("failed: WorkerLost", secondary=True), 5)
    assert first.ended_after_loss
    assert waits_for_the_cause(first)
    two.connections[1].close()
    assert not waits_for_the_cause(first)


def test_of_two_that_need_each_other_in_vain_only_the_second_waits(two):
    first, second = two.links
    first.say_farewell(Finished(2), 5)
    assert second.wait_until_ended({0}, 5)
    second.say_farewell(Finished(2), 5)
    for link, other in ((first, 1), (second, 0)):
        link.loss(other)  # of which a thread that reads ahead learns
    assert [link.ended_after_loss for link in two.links] == [False, True]


def test_who_follows_a_failure_that_is_not_known_yet_waits_for_it():
    with InMemoryCluster(3) as three:
        first, second, third = three.links
        first.say_farewell(Failed("failed: InputFailed", secondary=True), 5)
        second.say_farewell(Failed("failed: InputFailed", secondary=True), 5)
        three.connections[1].close()
        assert waits_for_the_cause(first)  # worker 1 has failed on account of worker 2, too
        third.say_farewell(Failed("failed: ValueError", secondary=False), 5)
        assert waits_for_the_cause(first)
        three.connections[2].close()
        assert not waits_for_the_cause(first)
