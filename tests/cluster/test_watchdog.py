"""The worker that is blamed, and the time, for reports of made-up workers."""

from __future__ import annotations

import socket
import time

import pytest
from in_memory_cluster import InMemoryCluster, members

from replicax.cluster import _watchdog
from replicax.cluster._messages import Failed, Finished, Look, Put, Report, Unreached
from replicax.cluster._progress import Progress, Waiting
from replicax.cluster._reach import Reach
from replicax.cluster._watchdog import Watchdog
from replicax.errors import WorkerLost


class Bench:
    """The watchdog of worker 0, which is at its third collective."""

    def __init__(self, cluster: InMemoryCluster) -> None:
        self.others = cluster.links
        self.progress = Progress()
        for _ in range(3):
            with self.progress.together("a step"):
                pass
        self.link = cluster.links[0]
        everyone = members(len(cluster.links))
        self.reach = Reach(everyone, timeout_seconds=60)
        self.watchdog = Watchdog(everyone, self.link, self.progress, 60, self.reach)

    def ends(self, worker: int, message: Finished | Failed) -> None:
        self.others[worker].send(message)
        while worker not in self.link.ended:
            time.sleep(0.001)
        self.link.ended_at -= 10  # long ago

    def reports(
        self, worker: int, number: int, label: str = "a step", look: Look | None = None
    ) -> None:
        where = ("data.py:31 in decode",)
        self.others[worker].send(Report(number, label, None, 0.0, where, look))

    def require_all(self, topic: str | None = None) -> None:
        self.watchdog.require_all(Waiting("a step", time.monotonic(), topic))

    def check(self, waited: float = 30, topic: str | None = None) -> bool:
        return self.watchdog.check(Waiting("a step", time.monotonic() - waited, topic))

    def check_until_judged(self) -> None:
        deadline = time.monotonic() + 10
        while not self.check(waited=61):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(_watchdog, "_REPORT_SECONDS", 0.02)
    monkeypatch.setattr(_watchdog, "_ANSWER_SECONDS", 0.2)
    with InMemoryCluster(3) as cluster:
        bench = Bench(cluster)
        yield bench
        bench.watchdog.close()


def test_all_are_well(bench):
    bench.check()


@pytest.mark.parametrize("number", [3, 4])
def test_one_that_has_finished_after_its_part_is_no_loss(bench, number):
    bench.ends(1, Finished(number))
    bench.check()
    bench.require_all()


def test_one_that_has_finished_before_its_part_is_a_loss(bench):
    bench.ends(1, Finished(2))
    with pytest.raises(WorkerLost, match=r"worker 1 \(.* has finished its program. worker 0 needs"):
        bench.check()
    with pytest.raises(WorkerLost, match="worker 1"):
        bench.require_all()


def test_one_that_has_finished_cannot_come_to_a_meeting(bench):
    bench.ends(1, Finished(4))
    with pytest.raises(WorkerLost, match="worker 1"):
        bench.check(topic="all_gather/0")
    with pytest.raises(WorkerLost, match="worker 1"):
        bench.require_all(topic="all_gather/0")


def test_a_failure_is_blamed_before_one_that_has_finished(bench):
    bench.ends(1, Finished(2))
    bench.ends(2, Failed("failed: ValueError", secondary=False))
    with pytest.raises(WorkerLost, match=r"worker 2 \(.*\) failed: ValueError"):
        bench.check()


def test_one_that_failed_on_account_of_another_is_blamed_last(bench):
    bench.ends(2, Failed("failed: WorkerLost", secondary=True))
    with pytest.raises(WorkerLost, match=r"worker 2 \(.*\) failed: WorkerLost"):
        bench.check()
    bench.ends(1, Finished(2))
    with pytest.raises(WorkerLost, match=r"worker 1 \(.*\) has finished its program"):
        bench.check()
    assert bench.link.lost == 1


def test_a_loss_is_given_time(bench):
    bench.ends(1, Failed("failed", secondary=False))
    bench.check(waited=0.5)
    bench.link.ended_at = time.monotonic()
    bench.check()


def test_one_that_is_behind_is_named_after_the_timeout(bench):
    bench.reports(1, 3)
    bench.reports(2, 2)
    bench.check(waited=59)
    with pytest.raises(WorkerLost) as caught:
        bench.check(waited=61)
    first, *lines, cure = str(caught.value).splitlines()
    assert first.startswith("worker 0 has waited 61 s in a step (collective 3) for worker 2 (")
    assert lines[2].startswith("  worker 2: alive, busy, at collective 2 (a step); stands at data.")
    assert "`timeout_seconds`" in cure


def test_one_that_is_in_another_program_is_named(bench):
    bench.reports(1, 3, "another step")
    bench.reports(2, 3)
    with pytest.raises(WorkerLost, match=r"for worker 1 \("):
        bench.check(waited=61)


def test_one_that_has_not_put_its_value_is_named(bench):
    bench.link.send(Put("topic", "0"))
    bench.others[2].send(Put("topic", "2"))
    with pytest.raises(WorkerLost, match=r"for worker 1 \("):
        bench.check(waited=61, topic="topic")


def test_one_that_is_silent_is_named(bench, monkeypatch):
    monkeypatch.setattr(_watchdog, "_SILENT_SECONDS", 0.0)
    with pytest.raises(WorkerLost, match=r"for worker 1 .* and worker 2 ") as caught:
        bench.check(waited=61)
    assert "worker 1: has not reported yet" in str(caught.value)


def test_a_program_of_all_workers_may_take_long(bench):
    for worker in (1, 2):
        bench.reports(worker, 3, look=Look(3, 1, ()))
    assert not bench.check(waited=59)
    bench.check_until_judged()
    assert not bench.check(waited=61)  # which was found a moment ago, and is not asked again


def test_workers_look_again_after_the_next_timeout(bench):
    for worker in (1, 2):
        bench.reports(worker, 3, look=Look(3, 1, ()))
    bench.check_until_judged()
    bench.watchdog._judged -= 61
    assert not bench.check(waited=122)
    time.sleep(0.1)
    assert not bench.check(waited=122)  # what the others saw the first time does not count
    bench.reports(1, 3, look=Look(3, 2, (Unreached(2, "10.0.0.3:4", "no answer"),)))
    bench.reports(2, 3, look=Look(3, 2, ()))
    with pytest.raises(WorkerLost, match="cannot reach worker 2's port"):
        bench.check(waited=122)


def test_workers_that_do_not_reach_each_other_are_named(bench):
    bench.reports(1, 3, look=Look(3, 1, (Unreached(2, "10.0.0.3:4", "no answer"),)))
    bench.reports(2, 3, look=Look(3, 1, (Unreached(1, "10.0.0.2:5", "no answer"),)))
    with pytest.raises(WorkerLost) as caught:
        bench.check_until_judged()
    assert str(caught.value) == (
        "worker 0 has waited 61 s in a step (collective 3), and some workers do not reach each "
        "other: worker 1 (10.0.0.1:1001) cannot reach worker 2's port 10.0.0.3:4 (no answer); "
        "worker 2 (10.0.0.1:1002) cannot reach worker 1's port 10.0.0.2:5 (no answer). Look at the "
        "network between them."
    )


def test_one_that_has_looked_and_ended_since_is_still_named(bench):
    bench.reports(1, 3, look=Look(3, 1, (Unreached(2, "10.0.0.3:4", "no answer"),)))
    bench.reports(2, 3, look=Look(3, 1, (Unreached(1, "10.0.0.2:5", "no answer"),)))
    bench.ends(2, Failed("failed: WorkerLost: some workers do not reach", secondary=False))
    bench.link.ended_at = time.monotonic()
    with pytest.raises(WorkerLost, match=r"worker 1 .*worker 2's port .*worker 2 .*worker 1's po"):
        bench.check_until_judged()


def test_a_worker_that_this_one_does_not_reach_is_named(bench):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        bench.reach.learn([None, f"127.0.0.1:{port}", None])
        for worker in (1, 2):
            bench.reports(worker, 3, look=Look(3, 1, ()))
        with pytest.raises(WorkerLost, match=rf"worker 0 .* cannot reach worker 1's port .*{port}"):
            bench.check_until_judged()


def test_others_are_given_time_to_look_and_what_they_saw_before_does_not_count(bench, monkeypatch):
    bench.reach.seconds = 0.3
    monkeypatch.setattr(_watchdog, "_LATE_SECONDS", 0.2)
    bench.reports(1, 3, look=Look(2, 1, (Unreached(2, "10.0.0.3:4", "no answer"),)))
    bench.reports(2, 3)
    started = time.monotonic()
    bench.check_until_judged()
    assert time.monotonic() - started > 0.5


def test_one_that_has_finished_need_not_be_reached(bench):
    bench.reports(2, 3)
    bench.ends(2, Finished(3))
    bench.reports(1, 3, look=Look(3, 1, (Unreached(2, "10.0.0.3:4", "Connection refused"),)))
    bench.check_until_judged()


def test_what_comes_by_the_hub_needs_no_look(bench):
    bench.link.send(Put("topic", "0"))
    for worker in (1, 2):
        bench.others[worker].send(Put("topic", str(worker)))
    assert bench.check(waited=61, topic="topic")


def test_a_failure_may_have_been_the_network(bench):
    waiting = Waiting("a step", time.monotonic())
    for worker in (1, 2):
        bench.reports(worker, 3, look=Look(3, 1, ()))
    bench.watchdog.look_around(waiting, ValueError("Gloo"))
    bench.reports(1, 3, look=Look(3, 2, (Unreached(2, "10.0.0.3:4", "no answer"),)))
    bench.reports(2, 3, look=Look(3, 2, ()))
    with pytest.raises(WorkerLost, match=r"worker 1 .* cannot reach worker 2") as caught:
        bench.watchdog.look_around(waiting, ValueError("Gloo"))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_judge_that_ends_while_it_is_asked_has_said_why(bench, monkeypatch):
    """The hub ends with the first worker, whose own wait was over in the same moment."""

    def state(seconds):
        bench.ends(1, Failed("failed: WorkerLost: worker 2 is stopped", secondary=True))

    monkeypatch.setattr(bench.link, "state", state)
    with pytest.raises(WorkerLost, match=r"worker 1 .* failed: WorkerLost: worker 2 is stopped"):
        bench.check(waited=61)
