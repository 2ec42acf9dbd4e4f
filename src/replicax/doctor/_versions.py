"""The installed versions, from metadata, because importing TensorFlow takes seconds."""

from __future__ import annotations

import platform
from importlib import metadata

from replicax import _known_bad
from replicax.doctor._check import Check, ok, problem

_NEEDED = ("replicax", "jax", "jaxlib", "optax", "grain", "orbax-checkpoint")
# The names of packages, and the distributions that they may come from.
_OPTIONAL = {
    "keras": ("keras",),
    "flax": ("flax",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "torch": ("torch",),
    "kubernetes": ("kubernetes",),
}


def check_versions() -> list[Check]:
    """Check Python, the required packages and the optional ones."""
    checks = [ok("Python", platform.python_version())]
    checks += [_needed(name) for name in _NEEDED]
    jaxlib = _known_bad.installed_version()
    checks += [
        problem(f"jaxlib {jaxlib}", str(defect), f"Install another version: {_known_bad.advice()}")
        for defect in _known_bad.defects_of(jaxlib)
    ]
    checks += [
        ok(name, _installed(*distributions) or "not installed (optional)")
        for name, distributions in _OPTIONAL.items()
    ]
    return checks


def _needed(name: str) -> Check:
    version = _installed(name)
    if version is None:
        return problem(name, "not installed", f"Install it: `pip install {name}`.")
    return ok(name, version)


def _installed(*distributions: str) -> str | None:
    for name in distributions:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return version if name == distributions[0] else f"{version} ({name})"
    return None
