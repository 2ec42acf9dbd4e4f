"""Workers that ask at their own pace stop at the same question."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
from in_memory_cluster import InMemoryCluster, nothing

from replicax.cluster._agreed_stop import AgreedStop
from replicax.cluster._messages import Calls, Preempted


def test_questions_are_answered_at_once_until_somebody_must_stop():
    sent = []
    stop = AgreedStop(sent.append)
    assert not any(stop.asked(nothing) for _ in range(5))
    stop.request()
    stop.answer()
    assert sent == [Preempted(), Calls(5)]
    stop.set(7)
    assert [stop.asked(nothing) for _ in range(3)] == [False, True, True]


def test_who_waits_for_the_answer_calls_check():
    stop = AgreedStop(lambda message: None)
    stop.answer()

    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        stop.asked(check)


@pytest.mark.parametrize("seed", range(5))
def test_all_stop_at_one_question(seed):
    random_ = random.Random(seed)
    paces = [random_.random() * 2e-3 for _ in range(3)]
    told = random_.randrange(3)
    stops: list[int | None] = [None] * 3

    def work(worker: int) -> None:
        stop = cluster.links[worker].agreed_stop
        pause = threading.Event()
        for step in itertools.count():
            if worker == told and step == 5:
                stop.request()
            if stop.asked(nothing):
                stops[worker] = step
                return
            pause.wait(paces[worker])

    with InMemoryCluster(3) as cluster:
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert stops[0] is not None
    assert len(set(stops)) == 1
