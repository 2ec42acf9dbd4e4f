"""Random trials from a fixed seed, for three minutes; and that trials are what they claim to be."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos import schedules, trials
from chaos.damage import DAMAGES, Damage
from chaos.judging import Attempt, blamed, problems
from chaos.schedules import Event, Feeding, Iterating, Restoring, Training

import replicax as rx

SEED = 293


@pytest.mark.slow
# TensorStore tells the event loop of what it could not read when that has been closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("kind", "seconds"),  # three minutes in all, but for the last trial of each
    [(Training, 120.0), (Restoring, 40.0), (Feeding, 10.0), (Iterating, 10.0)],
    ids=lambda value: value.__name__.lower() if isinstance(value, type) else "",
)
def test_what_is_promised_holds_whatever_happens(kind, seconds):
    done = list(trials.run(SEED, seconds, kind=kind))
    print(f"{len(done)} trials")
    failed = [str(trial) for trial in done if trial.problems]
    assert done
    assert not failed, "\n".join(failed)


def test_a_seed_and_a_number_are_a_trial():
    drawn = [schedules.draw(SEED, number) for number in range(200)]
    assert drawn == [schedules.draw(SEED, number) for number in range(200)]
    assert drawn != [schedules.draw(SEED + 1, number) for number in range(200)]
    for plan in drawn:
        if isinstance(plan, Training):
            assert schedules.training_from_json(schedules.to_json(plan)).events == plan.events


def test_everything_is_drawn_sooner_or_later():
    plans = [schedules.draw(SEED, number) for number in range(4000)]
    trainings = [plan for plan in plans if isinstance(plan, Training)]
    events = [event for plan in trainings for event in plan.events]
    drawn = {(event.phase, event.kind) for event in events if not event.launcher}
    assert drawn == {(phase, kind) for phase, kinds in schedules.KINDS.items() for kind in kinds}
    assert {event.kind for event in events if event.launcher} == set(schedules.LAUNCHER_KINDS)
    assert {plan.workers for plan in trainings} == {2, 3}
    assert {plan.input for plan in trainings} == set(schedules.INPUTS)
    damages = [d for plan in plans if isinstance(plan, Restoring) for d in plan.damages]
    assert {damage.kind for damage in damages} == set(DAMAGES)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_done(kind, tmp_path):
    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    path = rx.Checkpoint(a=rx.Variable([1.0, 2.0]), number=3).write(tmp_path / "model")
    before = files()
    Damage(kind, 0.3, 0.6).apply(Path(path))
    assert files() != before


def attempt(event: Event | None, said: str, *logs: str, code: int | None) -> Attempt:
    return Attempt(said, logs, event, seconds=1.0, code=code)


LOST = "replicax.errors.WorkerLost: worker {} (127.0.0.1:1) exited. worker {} needs it for a step."
WAITED = (
    "replicax.errors.WorkerLost: worker 0 has waited 9 s in `f` (collective 2) for worker 1 (h)."
)
KILLED = Event("SIGKILL", "step", worker=1)
FIRST = "[launcher] Worker 1 failed first: killed by SIGKILL after 3.0 s.\n"


@pytest.mark.parametrize(
    ("seen", "wrong"),
    [
        (attempt(KILLED, FIRST, LOST.format(1, 0), "", code=137), None),
        (attempt(KILLED, FIRST, LOST.format(1, 0), "", code=None), None),
        (attempt(KILLED, FIRST, LOST.format(1, 0), "", code=1), "ended with code 1, and not 137"),
        (attempt(KILLED, FIRST, "", LOST.format(0, 1), code=137), "blames another than worker 1"),
        (
            attempt(KILLED, FIRST.replace("Worker 1", "Worker 0"), "", "", code=137),
            "worker 1 did not fail first",
        ),
        (attempt(None, "", "", "", code=0), None),
        (attempt(None, "[launcher] Worker 0 failed first: …", "", "", code=1), "did not end well"),
        (attempt(None, "", LOST.format(1, 0), "", code=0), "nothing was to be lost"),
        (attempt(Event("slow", "step", 0), "", "", "", code=1), "did not end well"),
        (attempt(Event("SIGSTOP", "step", 1), WAITED, WAITED, "", code=1), None),
        (
            attempt(Event("SIGSTOP", "step", 2), WAITED, WAITED, "", code=1),
            "does not show who was missed",
        ),
        (
            attempt(
                Event("SIGTERM", "step", 1),
                "[launcher] Worker 0 failed first: exit code 143 after 3.0 s.",
                "stopped after step 3\n",
                "stopped after step 4\n",
                code=143,
            ),
            "stopped after different steps",
        ),
        (
            attempt(Event("full disk", "step", 0), "", "SaveFailed: worker 0 x", "", code=1),
            "1 of 2 workers raised SaveFailed",
        ),
        (
            attempt(Event("SIGINT", "step", 0, launcher=True), "", "", "", code=1),
            "the launcher got SIGINT, and ended with code 1",
        ),
    ],
)
def test_what_does_not_hold_is_seen(seen, wrong):
    found = problems(seen)
    assert bool(found) == bool(wrong), found
    assert wrong is None or wrong in "\n".join(found)


def test_a_worker_that_takes_too_long_to_end_is_seen():
    late = Attempt(FIRST, ("", ""), KILLED, seconds=500.0, code=137)
    assert "took 500 s to end" in problems(late)[0]


def test_who_is_blamed():
    assert blamed(LOST.format(2, 0)) == {2}
    assert blamed(WAITED) == {1}
    assert blamed(f"WorkerLost: worker 0 (h) failed: {WAITED}") == {1}
    assert blamed(f"WorkerLost: worker 2 (h) failed: {LOST.format(1, 2)} (a.py:3)") == {1}
    assert blamed("StartFailed: Not all … worker 0 still waits for worker 1 (h). Start …") == {1}
    assert blamed("StartFailed: worker 1 could not reach worker 0 (h) for 15 s: refused.") == {0}
