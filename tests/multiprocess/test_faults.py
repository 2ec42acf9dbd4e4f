"""Something happens to one worker at one step: who says what, how soon, and how all end."""

from __future__ import annotations

import json
import re

import pytest
from workers import Ended, run

PROGRAM = "tests/multiprocess/faulty_training.py"
STEP = 3
TIMEOUT = 4.0
# What a worker needs to start and to come to the step, on two busy cores.
START = 60.0


def happened_at(ended: Ended, event: str) -> float:
    found = re.search(rf"^{event} at ([\d.]+)$", ended.output, re.MULTILINE)
    assert found, ended.output
    return float(found[1])


def said_at(ended: Ended) -> float:
    found = re.search(r"^lost at ([\d.]+)$", ended.output, re.MULTILINE)
    assert found, ended.output
    return float(found[1])


def lines_with(text: str, ended: Ended) -> list[str]:
    return [line for line in ended.output.splitlines() if text in line]


def faults(
    event: str,
    worker: int,
    devices: int = 1,
    workers: int = 2,
    steps: int = 8,
    but: int | None = None,
) -> list[Ended]:
    return run(
        [PROGRAM, event, str(worker), str(STEP), str(TIMEOUT), str(steps)],
        START + 3 * TIMEOUT,
        but,
        workers=workers,
        devices=devices,
    )


ENDS = {
    "raise": (1, "failed: ArithmeticError: a fault of the program"),
    "SIGKILL": (-9, "exited without reporting an error"),
    "exit": (0, "exited without reporting an error"),
    "leave": (3, "has finished its program"),
}


@pytest.mark.parametrize(
    ("event", "worker", "devices"),
    # With several devices a process, what is left of a collective goes on among these.
    [*((event, worker, 1) for event in ENDS for worker in (0, 1)), ("SIGKILL", 1, 2)],
)
def test_a_worker_that_ends_is_named_by_the_others(event, worker, devices):
    code, reason = ENDS[event]
    ended = faults(event, worker, devices)
    culprit, survivor = ended[worker], ended[1 - worker]
    assert culprit.code == code, culprit.output
    assert survivor.code == 1, survivor.output
    (lost,) = lines_with("replicax.errors.WorkerLost", survivor)
    assert re.search(rf"worker {worker} \(127\.0\.0\.1:\d+\) {re.escape(reason)}", lost), lost
    assert f"step {STEP - 1}" in survivor.output
    assert f"step {STEP}\n" not in survivor.output
    # The survivor was in a collective with the culprit, and is told within seconds.
    assert said_at(survivor) - happened_at(culprit, event) < 8
    # The variable is what it was before the step, and can be saved.
    (kept,) = re.findall(r"^kept (.*)$", survivor.output, re.MULTILINE)
    assert json.loads(kept) == pytest.approx([(1 - 0.2 * 2 * devices) ** STEP] * 3, rel=1e-5)
    # The culprit's traceback is shown once, by itself.
    assert culprit.output.count("Traceback") == (event == "raise")
    assert "Traceback" not in survivor.output


def test_all_of_four_workers_are_told():
    first, second, culprit, fourth = faults("SIGKILL", 2, workers=4)
    assert culprit.code == -9
    for survivor in (first, second, fourth):
        assert survivor.code == 1
        (lost,) = lines_with("replicax.errors.WorkerLost", survivor)
        assert "WorkerLost: worker 2 " in lost


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("event", ["SIGSTOP", "loop"])
def test_a_worker_that_is_stuck_is_named_after_the_timeout(event, worker):
    ended = faults(event, worker, but=worker)
    survivor = ended[1 - worker]
    assert survivor.code == 1, survivor.output
    assert ended[worker].code is None, "it is stuck, and was killed by the test"
    (lost,) = lines_with("replicax.errors.WorkerLost", survivor)
    assert re.search(rf"has waited \d+ s in .*train_step.* for worker {worker} ", lost), lost
    waited = said_at(survivor) - happened_at(ended[worker], event)
    assert TIMEOUT - 1 < waited < TIMEOUT + 10, waited
    if event == "loop":  # it is alive, and can say where it stands
        (where,) = lines_with(f"  worker {worker}: alive, busy", survivor)
        assert "in happen" in where
    elif worker == 1:
        (where,) = lines_with("  worker 1: not heard of for", survivor)
        assert "collective" in where
    else:
        assert lines_with("  worker 0: has not been heard of for", survivor)


def test_a_worker_whose_input_is_blocked_stands_at_its_input():
    waiting, blocked = run(["tests/multiprocess/blocked_input.py"], START + 3 * TIMEOUT, 1)
    assert (waiting.code, blocked.code) == (1, None), waiting.output
    assert waiting.output.startswith("step\n")
    (where,) = lines_with("  worker 1: alive, busy", waiting)
    assert re.search(r"stands at \S+blocked_input.py:\d+ in main.*read_rows \(reading its", where)
    assert re.search(r"; \S+blocked_input.py:\d+ in main;", where)
    (own,) = lines_with("  worker 0: alive, waiting", waiting)
    assert "reading its input" not in own


@pytest.mark.parametrize("worker", [0, 1])
def test_a_slow_worker_is_waited_for(worker):
    for ended in faults("slow", worker):
        assert ended.code == 0, ended.output
        assert "step 7" in ended.output


@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_that_is_told_to_stop_stops_all_at_one_step(worker):
    ended = faults("SIGTERM", worker, steps=200)
    assert [each.code for each in ended] == [0, 0], [each.output for each in ended]
    stops = [lines_with("stopped before step", each) for each in ended]
    assert len(stops[0]) == 1
    assert stops[0] == stops[1]
    assert lines_with("weight", ended[0]) == lines_with("weight", ended[1])


def test_a_worker_that_has_finished_is_no_loss_to_one_that_needs_nothing_more_from_it():
    for ended in run(["tests/multiprocess/own_pace.py"], START):
        assert ended.code == 0, ended.output
        assert "result 3.0" in ended.output


def test_nothing_happens():
    for ended in faults("nothing", 0):
        assert ended.code == 0, ended.output
        assert "WorkerLost" not in ended.output


def test_programs_that_take_long_are_no_failure():
    for ended in run(["tests/multiprocess/patience.py"], 90):
        assert ended.code == 0, ended.output
        assert "both: 2.0\n" in ended.output
        assert "last: 2.0\n" in ended.output
        before, _, _ = ended.output.partition("both")
        assert re.search(r"has waited \d+ s in .*, as all workers have, and waits on\.", before)


def test_a_worker_that_was_interrupted_in_a_step_does_not_go_on():
    interrupted, other = run(["tests/multiprocess/interrupted.py"], 60)
    assert "interrupted\nrefused: worker 0 was interrupted in" in interrupted.output
    assert interrupted.code == 1
    assert other.code == 1
    assert "WorkerLost: worker 0" in other.output
