"""A test of two worker processes on this machine: their results and their speed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, final

from replicax.doctor._check import Check, note, ok, problem
from replicax.doctor._self_test_worker import MARKER
from replicax.launch import environments, free_ports
from replicax.launch._worker import Worker

_COMMAND = (sys.executable, "-u", "-P", "-m", "replicax.doctor._self_test_worker")
_PATIENCE_SECONDS = 120.0
_LAST_LINES = 12
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")


def self_test() -> list[Check]:
    """Start both workers, and return their findings."""
    try:
        settings = environments(free_ports(2), devices_per_worker=1, base=_environment())
        ended = run_together(_COMMAND, settings, _PATIENCE_SECONDS)
    except OSError as error:
        return [problem("workers", f"cannot be started: {error}", "See the ports above.")]
    failures = [_failure(worker, each) for worker, each in enumerate(ended) if each.code != 0]
    if failures:
        return failures
    reports = [each.report for each in ended]
    return [*judged(reports[0]["answers"]), *_measured(reports)]


@final
@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a worker; the code is None if it had to be killed."""

    code: int | None
    output: str

    @property
    def how(self) -> str:
        if self.code is None:
            return f"did not end within {_PATIENCE_SECONDS:.0f} s"
        if self.code < 0:
            return f"was ended by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"

    @property
    def report(self) -> dict[str, Any]:
        """The report that the worker printed, provided that it ended well."""
        lines = [line for line in self.output.splitlines() if line.startswith(MARKER)]
        return json.loads(lines[-1].removeprefix(MARKER))


def run_together(
    command: Sequence[str], settings: Sequence[Mapping[str, str]], seconds: float
) -> list[Exit]:
    """Run a worker in each environment, for `seconds` at most."""
    # The workers' context is inside the pool's: after Ctrl-C the workers are killed first, and so
    # the threads that wait for them end.
    with ThreadPoolExecutor(len(settings)) as pool, _started(command, settings) as workers:
        return list(pool.map(lambda worker: _end(worker, seconds), workers))


@contextlib.contextmanager
def _started(
    command: Sequence[str], settings: Sequence[Mapping[str, str]]
) -> Iterator[list[Worker]]:
    workers: list[Worker] = []
    try:
        for environment in settings:
            workers.append(Worker(command, environment))
        yield workers
    finally:
        for worker in workers:
            worker.close()


def _end(worker: Worker, seconds: float) -> Exit:
    try:
        output, _ = worker.process.communicate(timeout=seconds)
        code = worker.process.returncode
    except subprocess.TimeoutExpired:
        worker.send(signal.SIGKILL)
        output, _ = worker.process.communicate()
        code = None
    return Exit(code, output.decode(errors="replace"))


def _environment() -> dict[str, str]:
    """Return this process's environment, but with CPUs: two workers cannot share an accelerator."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return kept | {"JAX_PLATFORMS": "cpu"}


def _failure(worker: int, ended: Exit) -> Check:
    # XLA's own stack has many lines, none of which says what went wrong.
    lines = [line for line in ended.output.splitlines() if not line.lstrip().startswith("@ ")]
    last = "\n".join(lines[-_LAST_LINES:]).strip()
    said = f". It said last:\n{last}" if last else ", and said nothing"
    proxies = [name for name in os.environ if name.lower() in _PROXIES]
    advice = "If no worker says what is wrong, try `replicax doctor` again on a less busy machine."
    if proxies:  # gRPC, by which JAX's processes find each other, uses them even for 127.0.0.1
        advice = f"A proxy may be in the way: unset {', '.join(proxies)}, or set no_proxy. {advice}"
    return problem(f"worker {worker}", ended.how + said, advice)


def judged(answers: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Compare the results with the expected ones."""
    return [
        ok(each["name"], f"gives {each['got']}, as it should")
        if each["got"] == each["expected"]
        else problem(
            each["name"],
            f"gives {each['got']} instead of {each['expected']}",
            "Do not train with this installation: install the versions of JAX and jaxlib that "
            "replicax asks for, and if that does not help, report it as a bug.",
        )
        for each in answers
    ]


def _measured(reports: Sequence[Mapping[str, Any]]) -> list[Check]:
    first = reports[0]
    # Each worker measured from when it was ready; the later one did not wait.
    together = min(report["together"] for report in reports)
    megabytes, large = first["large_bytes"] / 1e6, first["large"]
    return [
        ok("coming together", f"{together:.2f} s"),
        ok("small all-reduce", f"{_milliseconds(first['small'])}, compiled"),
        ok("eager reduce", _milliseconds(first["eager"])),
        ok(
            "large all-reduce",
            f"{megabytes / large['median']:.0f} MB/s (best {megabytes / large['best']:.0f}), "
            f"compiled, {megabytes:.0f} MB",
        ),
        *_load(),
    ]


def _milliseconds(seconds: Mapping[str, float]) -> str:
    return f"{seconds['median'] * 1e3:.2f} ms (best {seconds['best'] * 1e3:.2f})"


def _load() -> list[Check]:
    """Return a note if other processes were busy at the same time."""
    processors, load = os.cpu_count() or 1, os.getloadavg()[0]
    if load <= processors + 2:  # our own two workers are not worth a note
        return []
    found = f"load {load:.0f} on {processors} processors: these are the times of a busy machine"
    return [note("this machine", found)]
