"""A contestant of several processes, one replica each: to run.py they are one.

run.py starts and asks worker 0, which starts the others and passes every request on to them:

worker 0                                                  another worker
(started with its place in the environment)         ->    builds
5                                                   ->
                                                    <-    ready: all of them begin
                                                    <-    done: all of them wait for the next line
end of input                                        ->    ends
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from _problem import AnyCell
from _protocol import WARMUP_STEPS, answers_only, cell_of, serve, take_steps

HOST = "127.0.0.1"
PLACE = "REPLICAX_BENCHMARK_WORKER"
END_LIMIT_SECONDS = 4  # less than run.py waits for worker 0


@dataclass(frozen=True)
class Worker:
    """One of the workers, and the addresses of all of them."""

    index: int
    addresses: Sequence[str]

    @property
    def tf_config(self) -> str:
        """The value of TF_CONFIG, for TensorFlow and replicax."""
        return json.dumps(
            {"cluster": {"worker": self.addresses}, "task": {"type": "worker", "index": self.index}}
        )


Build = Callable[[Any, Worker], Callable[[], Any]]


def serve_workers(
    build: Build, versions: Mapping[str, str], *, fetch: Callable[[Any], float] = float
) -> None:
    """Answer requests until the input ends.

    Args:
        build: Makes, for a cell and in each worker, the function that takes one step. It may return
            before the step is done.
        versions: The packages under test, for the report.
        fetch: Waits for what the last step of a turn returned, and converts it to a number. It is
            timed.
    """
    if PLACE in os.environ:
        _serve_other(build, fetch)
    else:
        _serve_first(build, versions, fetch)


def serve_replicas_or_workers(
    build: Callable[[Any, Worker | None], Callable[[], Any]], versions: Mapping[str, str]
) -> None:
    """Serve as several workers if that is the script's argument, and else as one process.

    The steps of one process are each awaited; those of workers at the end of a turn.
    """
    if sys.argv[1:] == ["workers"]:
        serve_workers(build, versions)
        return

    def build_awaited(cell: Any) -> Callable[[], float]:
        step = build(cell, None)
        return lambda: float(step())

    serve(build_awaited, versions)


def _serve_first(build: Build, versions: Mapping[str, str], fetch: Callable[[Any], float]) -> None:
    with _Others() as others:

        def build_first(cell: AnyCell) -> Callable[[], Any]:
            addresses = free_addresses(cell.replicas)
            others.start(cell, addresses)
            step = build(cell, Worker(0, addresses))
            others.begin(WARMUP_STEPS)
            return step

        serve(
            build_first,
            versions,
            fetch=fetch,
            before_steps=others.begin,
            after_steps=others.wait,
        )


def _serve_other(build: Build, fetch: Callable[[Any], float]) -> None:
    answers = answers_only()
    place = json.loads(os.environ[PLACE])
    requests = _Requests()
    step = build(cell_of(place["cell"]), Worker(place["index"], place["addresses"]))
    while (steps := requests.next()) is not None:
        print("ready", file=answers, flush=True)
        take_steps(step, steps, fetch)
        print("done", file=answers, flush=True)


class _Requests:
    """The lines of the input, read by a thread: even a worker that hangs notices the end.

    The workers wait for each other in every step, and some do so for minutes when one is gone.
    """

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._collect, daemon=True).start()

    def next(self) -> int | None:
        line = self._lines.get()
        return None if line is None else int(line)

    def _collect(self) -> None:
        for line in sys.stdin:
            self._lines.put(line)
        self._lines.put(None)
        time.sleep(END_LIMIT_SECONDS)
        os._exit(1)


class _Others:
    """The other workers, as the first one sees them. They end when it does, as their input ends."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> _Others:
        return self

    def __exit__(self, *_: object) -> None:
        # They are not awaited: some libraries synchronize their workers when they exit.
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()

    def start(self, cell: AnyCell, addresses: Sequence[str]) -> None:
        for index in range(1, len(addresses)):
            place = {"cell": asdict(cell), "index": index, "addresses": addresses}
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, *sys.argv],
                    env={**os.environ, PLACE: json.dumps(place)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def begin(self, steps: int) -> None:
        """Tell them how many steps there will be, and wait until all of them begin."""
        for process in self._processes:
            assert process.stdin is not None
            print(steps, file=process.stdin, flush=True)
        self._expect("ready")

    def wait(self) -> None:
        """Wait until all have taken their steps: the next contestant has the machine to itself."""
        self._expect("done")

    def _expect(self, expected: str) -> None:
        for index, process in enumerate(self._processes, start=1):
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if line != expected:
                raise RuntimeError(f"Worker {index} said {line!r} and not {expected!r}.")


def answer_question(measure: Callable[..., Mapping[str, object]]) -> None:
    """Print what `measure` returns for the question in the arguments, as one line of JSON.

    If that asks for several workers, this is worker 0: it starts the others, and all of them
    measure, but only its own answer is printed.

    Args:
        measure: Called with what the question holds, but with a `worker` for its `workers`; that
            is None if there are no others.
    """
    question = json.loads(sys.argv[1])
    workers = question.pop("workers")
    answers = answers_only()
    if PLACE in os.environ:
        measure(**question, worker=Worker(**json.loads(os.environ[PLACE])))
        return
    worker = start_others(workers) if workers > 1 else None
    print(json.dumps(measure(**question, worker=worker)), file=answers)


def start_others(workers: int) -> Worker:
    """Start this script again as the other workers, which end when this process does."""
    addresses = free_addresses(workers)
    for index in range(1, workers):
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env={**os.environ, PLACE: json.dumps({"index": index, "addresses": addresses})},
            stdout=subprocess.DEVNULL,
        )
    return Worker(0, addresses)


def nothing_to_compare(returned: Any) -> float:
    """Return 0, for steps that have waited already, and whose results are not compared."""
    return 0.0


def free_addresses(count: int) -> list[str]:
    """Return addresses on this machine that are free for now; they are not reserved."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [f"{HOST}:{each.getsockname()[1]}" for each in sockets]
