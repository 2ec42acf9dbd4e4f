"""Corrections of what Griffe finds in the source, for the reference."""

from __future__ import annotations

import re
from pathlib import Path

import griffe

# From a prompt to the next empty line.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n.*\S.*)*", re.MULTILINE)
PAGES = Path(__file__).parent / "reference"
SHOWN = {
    name
    for page in PAGES.glob("*.md")
    for name in re.findall(r"^::: .*?(\w+)$", page.read_text(), re.MULTILINE)
}


class AsUsersSeeIt(griffe.Extension):
    """An extension of Griffe: examples as code, no private bases, signatures of `__new__`."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Put the examples of a docstring between fences: prompts are quotations in Markdown."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: object) -> None:
        """Leave out bases of ours that have no place in the reference."""
        cls.bases = [base for base in cls.bases if self._is_shown(cls, str(base))]
        new = cls.members.get("__new__")
        if isinstance(new, griffe.Function) and "__init__" not in cls.members:
            cls.set_member("__init__", griffe.Function("__init__", parameters=new.parameters))

    @staticmethod
    def _is_shown(cls: griffe.Class, base: str) -> bool:
        name = base.partition("[")[0]
        try:
            ours = cls.resolve(name.partition(".")[0]).startswith("replicax.")
        except griffe.NameResolutionError:  # one of Python
            ours = False
        return not ours or name.rpartition(".")[2] in SHOWN
