"""Examples in docstrings, for the reference: Markdown takes their prompts for quotations."""

from __future__ import annotations

import re

import griffe

# From a prompt to the next empty line.
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n.*\S.*)*", re.MULTILINE)


class FencedExamples(griffe.Extension):
    """An extension of Griffe that makes every example a block of code."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Put the examples of a docstring between fences."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
