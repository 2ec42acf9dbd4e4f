"""Errors that end a program, past hooks and in threads."""

from __future__ import annotations

import sys
import threading

import pytest

from replicax.cluster._progress import Progress
from replicax.cluster._uncaught import Uncaught, place_of
from replicax.errors import WorkerLost


class Program:
    """A program whose errors are told to `told`, and shown to `shown` by the usual hooks."""

    def __init__(self) -> None:
        self.told: list[BaseException] = []
        self.shown: list[BaseException | None] = []
        sys.excepthook = lambda kind, error, trace: self.shown.append(error)
        threading.excepthook = lambda args: self.shown.append(args.exc_value)
        self.progress = Progress()
        self.uncaught = Uncaught(self.progress, self.told.append)

    def end_with(self, error: BaseException) -> None:
        """Do what Python does at exit."""
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)

    def fail_in_thread(self, error: BaseException, takes_part: bool = True) -> threading.Thread:
        def work() -> None:
            if takes_part:
                with self.progress.together("a step"):
                    pass
            raise error

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return thread


@pytest.fixture
def program(monkeypatch) -> Program:
    for name in ("excepthook", "last_exc", "last_value"):
        monkeypatch.setattr(sys, name, getattr(sys, name, None), raising=False)
    monkeypatch.setattr(sys, "last_exc", None)
    monkeypatch.setattr(sys, "last_value", None)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    return Program()


def test_an_error_is_told_and_shown(program):
    error = ValueError("bad")
    program.end_with(error)
    assert program.told == program.shown == [error]
    assert program.uncaught.unnoticed() is None  # it was noticed


def test_a_loss_is_shown_in_two_lines(program, capsys):
    try:
        raise WorkerLost("worker 1 failed.")
    except WorkerLost as error:
        program.end_with(error)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "replicax.errors.WorkerLost: worker 1 failed."
    assert "  This worker was at (" in second
    assert "test_uncaught.py:" in second
    assert program.shown == []


def test_an_error_that_another_hook_has_shown_is_found_at_the_end(program, monkeypatch):
    error = ValueError("bad")
    sys.excepthook = lambda *_: None
    program.end_with(error)
    assert program.told == []
    assert program.uncaught.unnoticed() == (error, threading.main_thread())
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert program.uncaught.unnoticed() is None  # somebody has typed it, and has gone on


def test_the_error_of_a_thread_that_takes_part_is_found_at_the_end(program):
    error = ValueError("bad")
    thread = program.fail_in_thread(error)
    assert program.shown == [error]
    assert program.uncaught.unnoticed() == (error, thread)
    with program.progress.together("another try"):
        pass
    assert program.uncaught.unnoticed() is None


def test_the_error_of_another_thread_ends_nothing(program):
    program.fail_in_thread(ValueError("bad"), takes_part=False)
    assert program.uncaught.unnoticed() is None


def test_an_error_without_a_traceback_has_no_place():
    assert place_of(ValueError()) == ""
