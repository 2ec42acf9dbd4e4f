"""The site: what is in it, and how it looks and searches."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import browser
import pytest
from test_public_members import MODULES

import replicax as rx
import replicax.launch

ROOT = Path(__file__).parents[1]
PUBLIC = [
    *MODULES,
    rx.compat.v1.data,
    rx.compat.v1.experimental,
    rx.config,
    rx.errors,
    rx.launch,
    rx.preemption,
]
DIRECTIVE = re.compile(r"^::: (\S+)(?:\n +options:\n +heading: (\S+))?", re.M)


def public_names() -> set[str]:
    """Return every public name but those of modules; without `__all__`, what claims the module."""
    found = {"replicax.BackupAndRestore"}  # looked up when it is asked for
    for module in PUBLIC:
        ours = [
            name
            for name, thing in vars(module).items()
            if not name.startswith("_") and getattr(thing, "__module__", "") == module.__name__
        ]
        found |= {
            f"{module.__name__}.{name}"
            for name in getattr(module, "__all__", ours)
            if not inspect.ismodule(getattr(module, name))
        }
    return found


def test_the_reference_has_every_public_name_once():
    """For a new one: a line `::: replicax.Name` in a page of docs/reference."""
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    shown = sorted(heading or name for name, heading in DIRECTIVE.findall(text))
    assert shown == sorted(public_names())


def test_every_example_is_listed():
    folder = ROOT / "examples"
    listed = re.findall(r"\]\(([^)]+\.py)\)", (folder / "README.md").read_text())
    assert sorted(listed) == sorted(str(x.relative_to(folder)) for x in folder.rglob("*.py"))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", target],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
        loaded = [tag for tag in tags if re.search(r"(?:src|href)=\"?(?:https?:)?//", tag)]
        assert not loaded, page


@pytest.mark.slow
def test_names_lead_to_the_reference_and_programs_to_their_pages(site):
    guide = (site / "docs" / "many_workers.html").read_text()
    assert 'href="reference/strategies.html#replicax.MultiWorkerMirroredStrategy"' in guide
    assert 'href="examples/resumable.py.html"' in (site / "index.html").read_text()
    assert "train_step" in (site / "examples" / "resumable.py.html").read_text()


@pytest.mark.slow
def test_signatures_are_those_of_calls(site):
    text = (site / "docs" / "reference" / "variables.html").read_text()
    (signature,) = re.findall(r'id="replicax\.Variable".*?<pre>(.*?)</pre>', text, re.S)
    assert "initial_value" in signature
    assert "*args" not in signature


@pytest.mark.slow
@pytest.mark.skipif(browser.BROWSER is None, reason="no chromium; `apt-get install chromium`")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_search_leads_to_the_reference(site, tmp_path, width):
    address = (site / "index.html").as_uri()
    links = "document.querySelectorAll('a.md-search-result__link')"
    with browser.Browser(tmp_path / "profile") as shown:
        shown.open(f"{address}?q=MirroredStrategy", (width, 900))
        shown.wait_for(f"{links}.length")
        hits = shown.evaluate(f"[...{links}].map(link => link.href)")
        hit = next(hit for hit in hits if "#" in hit)  # before it comes the page that it is in
        assert hit.endswith("#replicax.MirroredStrategy")
        shown.open(hit, (width, 900))
        heading = "document.getElementById('replicax.MirroredStrategy')"
        # It is in sight, below the bar, and nothing of the page is beyond its edge.
        shown.wait_for(f"{heading}.getBoundingClientRect().top < 400")
        assert shown.evaluate(f"{heading}.getBoundingClientRect().top") >= 0
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        shown.screenshot(tmp_path / "hit.png")
    seen = browser.colours(tmp_path / "hit.png")
    assert seen.most_common(1)[0][0] == "#ffffff"
    assert len(seen) > 100  # letters, and a bar
