"""The devices that JAX sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping

from replicax.doctor._check import Check, note, ok, problem

_VARIABLES = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES")
_MARKER = "replicax-devices "
_PROGRAM = f"""
import json, jax
devices = [[device.platform, device.device_kind] for device in jax.local_devices()]
print({_MARKER!r} + json.dumps(devices), flush=True)
"""
_PATIENCE_SECONDS = 120.0


def check_devices() -> list[Check]:
    """Check the devices that JAX sees, and the environment variables that affect them."""
    settings = [note(name, os.environ[name]) for name in _VARIABLES if name in os.environ]
    return [*ask_jax(os.environ), *settings]


def ask_jax(environment: Mapping[str, str]) -> list[Check]:
    """Ask JAX in a process of its own, because a driver can hang or bring down the process.

    An accelerator may be in use by another process, so its memory is not preallocated.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM],
            env={**environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return [
            problem(
                "local devices",
                f"JAX has not found any within {_PATIENCE_SECONDS:.0f} s",
                "Another process may hold the accelerator: end it. To do without accelerators, "
                "set JAX_PLATFORMS=cpu.",
            )
        ]
    said = done.stderr.strip().splitlines()
    found = [line for line in done.stdout.splitlines() if line.startswith(_MARKER)]
    if done.returncode or not found:
        last = said[-1] if said else f"exit code {done.returncode}"
        return [
            problem(
                "local devices",
                f"JAX finds none: {last}",
                "Correct the environment variables below, if there are any, or install the JAX "
                "for these devices; JAX_PLATFORMS=cpu always works.",
            )
        ]
    devices = Counter(map(tuple, json.loads(found[-1].removeprefix(_MARKER))))
    checks = [ok("local devices", _described(devices))]
    return checks + ([note("JAX says", said[-1])] if said else [])


def _described(devices: Counter[tuple[str, ...]]) -> str:
    """Describe devices for people: "2 gpu (NVIDIA H100)".

    >>> from collections import Counter
    >>> from replicax.doctor._devices import _described
    >>> _described(Counter({("gpu", "NVIDIA H100"): 2, ("cpu", "cpu"): 1}))
    '2 gpu (NVIDIA H100), 1 cpu'
    """
    return ", ".join(
        f"{count} {platform}" + ("" if kind == platform else f" ({kind})")
        for (platform, kind), count in devices.items()
    )
