"""The numbers of the installed jaxlib: programs that some versions get wrong, or crash on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from replicax import _known_bad
from replicax.doctor import _numbers_worker
from replicax.doctor._check import Check, note, ok, problem

_PATIENCE_SECONDS = 60.0


def check_numbers() -> list[Check]:
    """Run the programs on this machine's CPU, and again with an XLA flag where that may help."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    checks = self_checks(environment)
    missing = _known_bad.missing_cures()
    if missing and any(check.advice for check in checks):
        again = self_checks({**environment, "XLA_FLAGS": _known_bad.with_flags(missing)})
        checks.append(_with_flags(missing, [check for check in again if check.advice]))
    return checks


def self_checks(environment: Mapping[str, str]) -> list[Check]:
    """Run every program in a child process, so that a crash can be reported."""
    checks: list[Check] = []
    remaining = list(_numbers_worker.CHECKS)
    while remaining:
        answers, ending = _run(remaining, environment)
        checks += [_judged(**answer) for answer in answers]
        remaining = remaining[len(answers) :]
        if remaining and ending:  # the next one ended the process; the others remain to be done
            checks.append(problem(remaining.pop(0), ending, _advice()))
    return checks


def _run(names: list[str], environment: Mapping[str, str]) -> tuple[list[dict[str, Any]], str]:
    """Return the answers of a process, and how it ended if it did not answer everything."""
    command = [sys.executable, "-P", _numbers_worker.__file__, *names]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_SECONDS,
        )
        output, code, said = done.stdout, done.returncode, done.stderr.strip().splitlines()
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")  # bytes, in spite of `text=True`
        code, said = None, []
    marker = _numbers_worker.MARKER
    lines = [line for line in output.splitlines() if line.startswith(marker)]
    answers = [json.loads(line.removeprefix(marker)) for line in lines]
    if len(answers) == len(names):
        return answers, ""
    if code is None:
        return answers, f"did not end within {_PATIENCE_SECONDS:.0f} s"
    if code < 0:
        return answers, f"crashed the process ({signal.Signals(-code).name})"
    return answers, f"failed: {said[-1] if said else f'exit code {code}'}"


def _judged(name: str, got: object, expected: object) -> Check:
    if got == expected:
        return ok(name, f"gives {got}, as it should")
    return problem(name, f"gives {got} instead of {expected}", _advice())


def _with_flags(flags: list[str], failed: list[Check]) -> Check:
    name, given = "with XLA_FLAGS", " ".join(flags)
    if failed:
        still = ", ".join(check.name for check in failed)
        return note(name, f"{given}: does not cure {still}")
    return note(
        name,
        f"{given}: every check passes",
        "A strategy that is made before JAX is first used sets this flag by itself.",
    )


def _advice() -> str:
    version = _known_bad.installed_version()
    if _known_bad.defects_of(version):
        return f"jaxlib {version} is known to do this: {_known_bad.advice()}"
    return f"Do not train with jaxlib {version} on this machine: {_known_bad.advice()}"
