"""The files of the site: pages of the repository, under their own paths.

So one link works on both, a link to a program included, which has a page with its text here.
`mkdocs.yml` calls the functions.
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
    """Lead links to programs to their pages, and mark examples with prompts as such."""
    name = page.file.src_uri
    if name.startswith("docs/reference/"):
        page.meta["search"] = {"boost": 10}
    elif name == "CHANGELOG.md" or page.file.inclusion is InclusionLevel.NOT_IN_NAV:
        page.meta["search"] = {"exclude": True}
    markdown = LINK_TO_PROGRAM.sub(r"\1.md)", markdown)
    return markdown.replace("```python\n>>>", "```pycon\n>>>")


def _matching(patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
