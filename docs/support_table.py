"""The tables in `install.md`, made from the requirements and from the table of known defects.

Run this to write them, after a change of either:

    .venv/bin/python docs/support_table.py

A test fails where the page is not what this would write.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

from replicax._known_bad import DEFECTS

HERE = Path(__file__).parent
PAGE = HERE / "install.md"
END = "<!-- until here -->\n"
EXTRAS = ("keras", "flax", "ray", "tensorflow", "torch", "cuda12", "cuda13", "tpu")


def written(page: str) -> str:
    """Return the page with the tables in their places."""
    for name, table in (("versions", versions()), ("defects", defects())):
        begin = f"<!-- {name}, made by support_table.py -->\n"
        before, found, rest = page.partition(begin)
        if not found:
            raise ValueError(f"{PAGE} has no line {begin!r}")
        page = before + begin + table + END + rest.partition(END)[2]
    return page


def versions() -> str:
    """Return the table of what replicax works with."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    pythons = [
        classifier.rpartition(" ")[2]
        for classifier in project["classifiers"]
        if classifier.startswith("Programming Language :: Python :: 3.")
    ]
    rows = [("Python", project["requires-python"], f"tried: {', '.join(pythons)}")]
    rows += [_row(Requirement(text), "") for text in project["dependencies"]]
    for extra in EXTRAS:
        required = Requirement(project["optional-dependencies"][extra][0])
        rows.append(_row(required, f"`pip install 'replicax[{extra}]'`"))
    return _table(("library", "versions", "optional"), rows)


def defects() -> str:
    """Return the table of what is excluded, and why."""
    rows = [
        (
            ", ".join(defect.versions),
            defect.platform.upper(),
            defect.symptom,
            _link(defect.thread),
            f"`{defect.cure}`" if defect.cure else "none",
        )
        for defect in DEFECTS
    ]
    return _table(("jaxlib", "devices", "what it does", "thread", "XLA flag that cures it"), rows)


def _row(requirement: Requirement, extra: str) -> tuple[str, str, str]:
    parts = sorted(requirement.specifier, key=lambda part: (part.operator != ">=", str(part)))
    return requirement.name, ", ".join(map(str, parts)), extra


def _link(thread: str) -> str:
    if not thread:
        return "none known"
    repository, _, number = thread.partition("#")
    return f"[{thread}](https://github.com/{repository}/issues/{number})"


def _table(names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [names, ("---",) * len(names), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
