"""Contestants as subprocesses: started, asked with a bound on every wait, and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import click
from contestants._problem import AnyCell

CONTESTANTS = Path(__file__).parent / "contestants"
ANSWER_LIMIT_SECONDS = 120
QUESTION_LIMIT_SECONDS = 180
GOODBYE_LIMIT_SECONDS = 5
STDERR_LINES_SHOWN = 20


class ContestantProcess:
    """A running contestant, which speaks the protocol of `contestants/_protocol.py`."""

    def __init__(
        self,
        name: str,
        python: Path,
        script: Path,
        *arguments: str,
        answer_limit_seconds: float = ANSWER_LIMIT_SECONDS,
    ) -> None:
        self.name = name
        self._answer_limit_seconds = answer_limit_seconds
        # This is a file, not a pipe, which would block the contestant unless it is read.
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, closed in end
        self._process = subprocess.Popen(
            [python, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            # It has a group of its own: Ctrl-C reaches run.py alone, which then ends the
            # contestants, and a kill includes what the contestant started. If run.py is killed
            # instead, the contestant sees the end of its input and ends by itself.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._stdin = self._process.stdin
        # A blocking readline has no bound; a queue filled by a thread has.
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._collect_answers, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(patiently=error is None)

    def build(self, cell: AnyCell) -> dict[str, Any]:
        """Have the contestant build and warm up, and wait until it is ready."""
        self._send(json.dumps(asdict(cell)))
        return self.receive(str(cell))

    def run_steps(self, steps: int) -> dict[str, Any]:
        request = f"steps {steps}"
        self._send(request)
        return self.receive(request)

    def receive(self, request: str) -> dict[str, Any]:
        """Return the next answer; raise an error that names the contestant if there is none."""
        try:
            line = self._answers.get(timeout=self._answer_limit_seconds)
        except queue.Empty:
            self._kill()
            raise self._failure(
                f"did not answer {request!r} within {self._answer_limit_seconds:g} s and was "
                f"killed (process {self._process.pid})"
            ) from None
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GOODBYE_LIMIT_SECONDS)
            raise self._failure(
                f"ended with exit code {self._process.poll()} before it answered {request!r}"
            )
        return json.loads(line)

    def end(self, *, patiently: bool = True) -> None:
        """End the process; if patiently, close its input, and wait for it, with a bound."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        if patiently:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GOODBYE_LIMIT_SECONDS)
        self._kill()
        self._stderr.close()

    def _send(self, line: str) -> None:
        # A contestant that has ended cannot be written to; `receive` then says why it ended.
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(line + "\n")
            self._stdin.flush()

    def _collect_answers(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put("")

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(GOODBYE_LIMIT_SECONDS)

    def _failure(self, what: str) -> click.ClickException:
        self._stderr.seek(0)
        return _failure(f"{self.name} {what}", self._stderr.read())


def ask(
    script: str,
    question: Mapping[str, object],
    *,
    limit_seconds: float = QUESTION_LIMIT_SECONDS,
) -> dict[str, Any]:
    """Start a script of `contestants/` with a question; return its answer, one line of JSON.

    It runs in the environment of replicax, in a new process each time, because the number of
    devices is fixed in a process.
    """
    text = json.dumps(question)
    try:
        done = subprocess.run(
            [sys.executable, CONTESTANTS / script, text],
            capture_output=True,
            text=True,
            timeout=limit_seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise click.ClickException(
            f"{script} did not end within {limit_seconds:g} s and was killed: {text}."
        ) from error
    if done.returncode:
        raise _failure(f"{script} ended with exit code {done.returncode}: {text}", done.stderr)
    return json.loads(done.stdout)


def _failure(what: str, stderr: str) -> click.ClickException:
    lines = stderr.splitlines()[-STDERR_LINES_SHOWN:]
    return click.ClickException("\n".join([f"{what}. The last lines of its stderr:", *lines]))
