"""Starting the launcher once, with workers that run `program.py`, and what is left of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from chaos import schedules
from chaos.judging import Attempt
from chaos.schedules import Round, Training
from workers import ROOT

# What an attempt of the launcher may take in all, in seconds.
_ATTEMPT_SECONDS = 90.0
_NEVER = -1000  # the exit code of a launcher that had to be ended, which is never right


def launch(
    training: Training, each: Round, directory: Path, steps: int, name: str = "round"
) -> list[Attempt]:
    """Start the launcher once, and return its attempts; nothing that it started is left."""
    processes, logs = directory / "processes", directory / name
    processes.mkdir(exist_ok=True)
    happened_before = set(directory.glob("happened-*"))
    limit = _ATTEMPT_SECONDS * (each.restarts + 1)
    environment = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "XLA_FLAGS")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    options = {
        "--workers": training.workers,
        "--devices-per-worker": training.devices,
        "--max-restarts": each.restarts,
        "--backoff": 0,
        "--log-dir": logs,
    }
    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", "replicax", "launch"),
            *(str(word) for option in options.items() for word in option),
            *("-m", "chaos.program", str(directory), schedules.to_json(training), str(steps)),
        ],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for this process, which ends the others
    )
    try:
        try:
            _, said = launcher.communicate(timeout=limit)
            code = launcher.returncode
        except subprocess.TimeoutExpired:
            launcher.kill()
            _, said = launcher.communicate(timeout=_ATTEMPT_SECONDS)
            code = _NEVER
            said += f"\n[launcher] had not ended after {limit:.0f} s."
        ended = time.time()
        left = still_running(processes, seconds=10.0)
        if left:
            code = _NEVER
            said += f"\n[launcher] has left processes behind: {left}."
    finally:
        end(launcher, processes)
    happened = set(directory.glob("happened-*")) - happened_before
    return list(read_attempts(training, logs, said, code, ended, happened))


def read_attempts(
    training: Training, logs: Path, said: str, code: int | None, ended: float, happened: set[Path]
) -> Iterator[Attempt]:
    """Tell what was said in each attempt, and what happened in it."""
    folders = sorted(logs.glob("attempt-*"))
    messages = re.split(r"^(?=\[launcher)", said, flags=re.MULTILINE)
    for number, folder in enumerate(folders):
        last = folder is folders[-1]
        own = re.compile(rf"\[launcher, attempt {number}\] ")
        texts = tuple(
            (folder / f"worker-{worker}.log").read_text(errors="replace")
            for worker in range(training.workers)
        )
        begun = folder.stat().st_mtime
        event, since = None, begun
        for note in happened:
            if any(f" at {note.read_text()}\n" in text for text in texts) or len(folders) == 1:
                event = training.events[int(note.name.rpartition("-")[2])]
                since = note.stat().st_mtime
        yield Attempt(
            "".join(
                text
                for text in messages
                if own.match(text) or (last and not text.startswith("[launcher, attempt"))
            ),
            texts,
            event,
            (ended if last else folders[number + 1].stat().st_mtime) - since,
            code if last else None,
        )


def still_running(processes: Path, seconds: float) -> list[int]:
    """Return which workers are there after so many seconds, of all that have started."""
    deadline = time.monotonic() + seconds
    while True:
        left = [int(note.name) for note in processes.iterdir() if _runs(int(note.name))]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def end(launcher: subprocess.Popen[str], processes: Path) -> None:
    """Leave nothing behind, however the trial has ended."""
    if launcher.poll() is None:
        launcher.kill()  # its workers are killed with it
        launcher.communicate()
        still_running(processes, seconds=10.0)
    for note in list(processes.iterdir()):
        if _runs(int(note.name)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(note.name), signal.SIGKILL)
        note.unlink()


def _runs(process: int) -> bool:
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return b"chaos.program" in command  # a zombie has none, and the number may be another's by now
