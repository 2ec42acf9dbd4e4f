"""The public members of every exported class: a new one is a decision, and not an accident."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import replicax as rx

LIST = Path(__file__).parent / "public_members.json"
MODULES = [
    rx,
    rx.cluster_resolver,
    rx.compat.v1,
    rx.coordinator,
    rx.experimental,
    rx.experimental.partitioners,
    rx.metrics,
    rx.parts,
    rx.planning,
    rx.tpu.experimental,
]


def members(kind: type) -> list[str]:
    """Return the public members that a class, or one of ours behind it, defines."""
    ours = [each for each in kind.__mro__ if each.__module__.partition(".")[0] == "replicax"]
    names = {name for each in ours for name in vars(each) if not name.startswith("_")}
    return sorted(names - {"dimension_as_value"})  # which some versions of JAX look for


def exported() -> dict[str, list[str]]:
    found = {}
    for module in MODULES:
        for thing in vars(module).values():
            if inspect.isclass(thing) and thing.__module__ == module.__name__:
                found[f"{module.__name__}.{thing.__qualname__}"] = members(thing)
    found["replicax.function"] = members(type(rx.function(lambda: None)))
    return dict(sorted(found.items()))


def test_public_members():
    """To accept a change: `python tests/test_public_members.py`, and look at the difference."""
    assert exported() == json.loads(LIST.read_text())


if __name__ == "__main__":
    LIST.write_text(f"{json.dumps(exported(), indent=1)}\n")
