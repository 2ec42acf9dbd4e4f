"""The hub by itself: messages go in, and what it tells each worker is looked at."""

from __future__ import annotations

import pytest
from in_memory_cluster import members

from replicax.cluster import _messages as messages
from replicax.cluster._hub import Hub
from replicax.cluster._messages import (
    Disconnected,
    Ended,
    Failed,
    Finished,
    FromHub,
    Hello,
    Put,
    Value,
    Void,
)


class Seats:
    """A hub, and what each worker was told."""

    def __init__(self, count: int, here: int | None = None) -> None:
        self.hub = Hub(members(count), "10.0.0.1:999")
        self.addresses = tuple(str(address) for address in members(count).addresses)
        self.told: list[list[FromHub]] = [[] for _ in range(count)]
        for index in range(count if here is None else here):
            assert self.hello(index, self.told[index]) == index

    def hello(self, index: int, told: list[FromHub], **changed: object) -> int | None:
        hello = {"addresses": self.addresses, "versions": messages.versions(), **changed}
        return self.hub.admit(Hello(index, **hello), told.append)  # type: ignore[arg-type]

    def take(self, index: int) -> list[FromHub]:
        """Return the messages that the worker has received since the last call."""
        told, self.told[index][:] = list(self.told[index]), []
        return told


@pytest.fixture
def three() -> Seats:
    seats = Seats(3)
    for index in range(3):
        seats.take(index)
    return seats


def test_all_are_welcomed_when_the_last_has_come():
    seats = Seats(2, here=1)
    assert seats.take(0) == []
    seats.hello(1, seats.told[1])
    assert seats.take(0) == seats.take(1) == [messages.Welcome("10.0.0.1:999")]


def test_those_who_wait_are_told_of_one_that_was_turned_away():
    seats = Seats(3, here=1)
    assert seats.hello(2, [], versions={"jax": "0.1"}) is None
    (told,) = seats.take(0)
    assert isinstance(told, messages.TurnedAway)
    assert told.reason.startswith("A process that came as worker 2 (10.0.0.1:1002) was refused: ")
    assert seats.hello(1, [], versions={"jax": "0.1"}) is None
    assert seats.take(0) == []  # once
    seats.hello(1, seats.told[1])
    assert seats.take(1) == [told]
    seats.hello(2, seats.told[2])  # the right one, in the end
    assert seats.take(2) == [messages.Welcome("10.0.0.1:999")]


def test_nobody_is_told_of_one_that_was_turned_away_when_all_are_here(three):
    assert three.hello(1, []) is None
    assert three.hello(7, []) is None
    assert [three.take(index) for index in range(3)] == [[], [], []]


@pytest.mark.parametrize(
    ("index", "changed", "reason"),
    [
        (1, {"addresses": ("elsewhere:1",)}, "Give all workers the same cluster"),
        (1, {"addresses": ("10.0.0.1:1001", "10.0.0.1:1000")}, "Give all workers the same list"),
        (2, {}, "there is no worker of number 2"),
        (-1, {}, "there is no worker of number -1"),
        (0, {}, "another process has come as worker 0 already"),
        (1, {"versions": {"jax": "0.1"}}, "Install the same versions everywhere"),
    ],
)
def test_strangers_are_turned_away_with_the_reason(index, changed, reason):
    seats, told = Seats(2, here=1), []
    assert seats.hello(index, told, **changed) is None
    (refused,) = told
    assert isinstance(refused, messages.Refused)
    assert reason in refused.reason
    assert seats.hello(1, seats.told[1]) == 1  # the worker itself still may come


def test_one_that_does_not_introduce_itself_is_turned_away():
    seats, told = Seats(2, here=0), []
    assert seats.hub.admit(Finished(1), told.append) is None
    assert told == [
        messages.Refused("it began with a message of kind Finished, and not with a Hello")
    ]


def test_values_are_given_out_when_all_have_put_theirs(three):
    for worker in (2, 0):
        three.hub.handle(worker, Put("topic", f"{worker}"))
    assert [three.take(worker) for worker in range(3)] == [[], [], []]
    three.hub.handle(1, Put("topic", "1"))
    for worker in range(3):
        values = three.take(worker)
        others = {other: str(other) for other in range(3) if other != worker}
        assert {value.worker: value.value for value in values} == others
        assert all(isinstance(value, Value) for value in values)


def test_who_waits_for_one_that_has_ended_is_told(three):
    three.hub.handle(0, Put("topic", "0"))
    three.hub.handle(2, Finished(5))
    ended = Ended(2, messages.FINISHED, 5)
    assert three.take(0) == [ended, Void("topic", 2)]
    assert three.take(1) == [ended]
    three.hub.handle(1, Put("topic", "1"))  # who comes later is told too
    assert Void("topic", 2) in three.take(1)


def test_a_topic_for_which_one_that_has_ended_had_put_its_value_is_not_void(three):
    three.hub.handle(2, Put("topic", "2"))
    three.hub.disconnect(2, "is gone")
    three.hub.handle(0, Put("topic", "0"))
    three.hub.handle(1, Put("topic", "1"))
    gone = [Ended(2, "is gone"), Disconnected(2)]
    assert three.take(0) == [*gone, *(Value("topic", w, str(w)) for w in (2, 1))]


def test_withdrawn_values_are_forgotten(three):
    three.hub.handle(0, Put("topic", "0"))
    three.hub.handle(0, messages.Withdraw("topic"))
    three.hub.handle(1, messages.AskState())
    (state,) = three.take(1)
    assert state.missing == {}


def test_the_first_reason_stays(three):
    three.hub.handle(1, Failed("failed: ValueError", secondary=True))
    assert three.take(0) == [Ended(1, "failed: ValueError", secondary=True)]
    three.hub.disconnect(1, "is gone")
    assert three.take(0) == [Disconnected(1)]


def test_the_state_names_who_is_missing(three):
    report = messages.Report(3, "a step", None, 0.0, ())
    three.hub.handle(1, report)
    assert three.take(1) == [messages.Beat()]
    three.hub.handle(0, Put("topic", "0"))
    three.hub.handle(2, Failed("failed", secondary=False))
    three.take(0)
    three.hub.handle(0, messages.AskState())
    (state,) = three.take(0)
    assert state.missing == {"topic": (1, 2)}
    assert [known.report for known in state.workers] == [None, report, None]
    assert [known.ended for known in state.workers] == [None, None, "failed"]
    assert all(0 <= known.silent < 1 for known in state.workers)


def test_all_stop_at_the_first_question_that_nobody_has_had_an_answer_to(three):
    three.hub.handle(1, messages.Calls(9))  # nobody has asked for it
    three.hub.handle(1, messages.Preempted())
    three.hub.handle(2, messages.Preempted())
    assert three.take(0) == [messages.Deciding()]
    for worker, calls in ((0, 4), (1, 6), (2, 5)):
        assert three.take(0) == []
        three.hub.handle(worker, messages.Calls(calls))
    assert three.take(0) == [messages.Stop(7)]


def test_a_stop_does_not_wait_for_one_that_has_ended(three):
    three.hub.handle(0, messages.Preempted())
    three.hub.handle(0, messages.Calls(4))
    three.hub.handle(1, messages.Calls(2))
    three.take(0)
    three.hub.disconnect(2, "is gone")
    assert three.take(0) == [Ended(2, "is gone"), messages.Stop(5), Disconnected(2)]


def test_one_that_speaks_like_the_hub_is_out(three):
    three.hub.handle(1, messages.Stop(1))
    assert three.take(0) == [Ended(1, "sent a message of kind Stop")]
