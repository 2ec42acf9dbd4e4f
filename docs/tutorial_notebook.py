"""The notebook `tutorial.ipynb`, made from `tutorial.md`.

Run this to write it, after a change of the page:

    .venv/bin/python docs/tutorial_notebook.py

A test fails where the notebook is not what this would write, and runs the notebook.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE, NOTEBOOK = HERE / "tutorial.md", HERE / "tutorial.ipynb"
FENCE = re.compile(r"^```(\w+)(?: title=\"([^\"\n]+)\")?\n(.*?)^```\n", re.M | re.S)


def written(page: str) -> str:
    """Return the notebook of a page: programs and commands are cells, texts are their output."""
    cells: list[dict[str, Any]] = []
    place = 0
    for block in FENCE.finditer(page):
        language, title, code = block.groups()
        between, place = page[place : block.start()].strip(), block.end()
        if between:
            cells.append({"cell_type": "markdown", "source": between})
        if language == "text":
            cells[-1]["outputs"] = [{"name": "stdout", "output_type": "stream", "text": code}]
            continue
        magic = f"%%writefile {title}\n" if title else "%%bash\n" if language == "bash" else ""
        source = magic + code.rstrip()
        cells.append(
            {"cell_type": "code", "source": source, "outputs": [], "execution_count": None}
        )
    cells.append({"cell_type": "markdown", "source": page[place:].strip()})
    numbered = [{"id": f"cell-{i}", "metadata": {}, **cell} for i, cell in enumerate(cells)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = {"cells": numbered, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(written(PAGE.read_text()))
