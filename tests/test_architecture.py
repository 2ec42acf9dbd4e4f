"""ARCHITECTURE.md says what is true."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_picture_of_the_layers_is_the_contract():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract, *_) = project["tool"]["importlinter"]["contracts"]
    layers = [
        {name.strip().removeprefix("replicax.") for name in layer.split("|")}
        for layer in contract["layers"]
    ]
    text = (ROOT / "ARCHITECTURE.md").read_text()
    (picture, *_) = re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)
    known = set().union(*layers)
    # The second column has the modules, by lines; what follows two spaces explains them.
    modules = [re.split(r"  |:", line[15:].strip())[0] for line in picture.splitlines()]
    shown = [name for line in modules for name in re.findall(r"\w+", line) if name in known]
    assert sorted(shown) == sorted(known), "each once"
    depth = {name: number for number, layer in enumerate(layers) for name in layer}
    assert [depth[name] for name in shown] == sorted(depth[name] for name in shown)


def test_who_asks_for_the_program_is_listed():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    (rows,) = re.findall(r"^\| because \|.*?\n\n", text, re.M | re.S)
    listed = re.findall(r"`((?:\w+/)*\w+)`", rows)
    source = ROOT / "src" / "replicax"
    asking = [
        str(file.relative_to(source).with_suffix(""))
        for file in source.rglob("*.py")
        if re.search(r"(frame|current\(\))\.program\b", file.read_text())
    ]
    assert sorted(listed) == sorted(x for x in asking if not x.startswith("execution/"))


def test_the_files_that_are_named_exist():
    for page in ("ARCHITECTURE.md", "docs/decisions.md", "docs/life_of_a_step.md"):
        for path in re.findall(r"`((?:\w+/)*\w+\.py)`", (ROOT / page).read_text()):
            places = [ROOT / path, ROOT / "src" / path, ROOT / "src" / "replicax" / path]
            found = any(place.exists() for place in places)
            assert found or list((ROOT / "src").rglob(path)), f"{page} names {path}"
