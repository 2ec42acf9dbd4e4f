"""The files of the site: pages of the repository, under their own paths.

So one link works on both, a link to a program included, which has a page with its text here. What
is only here are links of public names to the reference. `mkdocs.yml` calls the functions.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
AS_THEY_ARE = (
    "*.md",
    "benchmarks/*.md",
    "benchmarks/*.png",
    "docs/**/*.md",
    "docs/**/*.ipynb",
    "docs/pictures/*",
    "docs/*.css",
    "docs/*.js",
    "examples/*.md",
)
PROGRAMS = ("examples/**/*.py", "examples/**/*.sh", "examples/**/*.yaml", "tests/jax_programs.py")
# A public name in the reference: how it is found there, and what it is called if that differs.
NAME = re.compile(r"^::: (\S+)(?:\n +options:\n +heading: (\S+))?", re.MULTILINE)
# Code, headings and links, in which names stay as they are; or a name.
PIECE = re.compile(
    r"^```.*?^```$|^(?: {4}|#).*?$|\[[^\]]*\]\([^)]*\)|`rx\.([\w.]+)`", re.MULTILINE | re.DOTALL
)
CELL, CODE = re.compile("<td.*?</td>", re.DOTALL), re.compile("<code>([^<]+)</code>")
PART = re.compile(r"(?<=[._(,=/])(?=\w)")
LINK_TO_PROGRAM = re.compile(r"(\]\((?!https?:)[^)\s]+\.(?:py|sh|yaml))\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files in docs/ by those of the repository."""
    for file in [*files]:
        if file.src_dir == config.docs_dir:
            files.remove(file)
    for path in _matching(AS_THEY_ARE):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    for path in _matching(PROGRAMS):
        name = path.relative_to(ROOT).as_posix()
        language = {".py": "python", ".sh": "bash", ".yaml": "yaml"}[path.suffix]
        text = f"# {path.name}\n\n`{name}`\n\n````{language}\n{path.read_text()}````\n"
        hidden = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, f"{name}.md", content=text, inclusion=hidden))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Lead links to programs to their pages, names to the reference; mark prompts as such."""
    name = page.file.src_uri
    if name.startswith("docs/reference/"):
        page.meta["search"] = {"boost": 10}
    elif name.startswith("docs/"):
        markdown = _with_links_to_reference(markdown)
    elif name == "CHANGELOG.md" or page.file.inclusion is InclusionLevel.NOT_IN_NAV:
        page.meta["search"] = {"exclude": True}
    markdown = LINK_TO_PROGRAM.sub(r"\1.md)", markdown)
    return markdown.replace("```python\n>>>", "```pycon\n>>>")


def on_page_content(html: str, **_: object) -> str:
    """Let long names in tables be broken where their parts begin, and nowhere else."""

    def with_breaks(code: re.Match[str]) -> str:
        return f"<code>{PART.sub('<wbr>', code[1])}</code>"

    return CELL.sub(lambda cell: CODE.sub(with_breaks, cell[0]), html)


def _with_links_to_reference(markdown: str) -> str:
    """Make the first mention of each public name a link."""
    pages = "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    places = {called or place: place for place, called in NAME.findall(pages)}

    def linked(piece: re.Match[str]) -> str:
        place = places.pop(f"replicax.{piece[1]}", None)
        return piece[0] if place is None else f"[{piece[0]}][{place}]"

    return PIECE.sub(linked, markdown)


def _matching(patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
