"""Every name of the five reference pages is here, is called the same way, and is in the docs.

docs/from_tf_distribute.md has a table for each class of the pages. The tables are read, and compared
with the pages (`reference_names.py`) and with the library.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from parity.reference_names import PAGES

import replicax as rx

DOCUMENT = Path(__file__).parents[2] / "docs" / "from_tf_distribute.md"

Names = Mapping[str, str | None]  # how each name is called; None for an attribute

# The two pages of one class differ by two methods, and agree on the others.
CLASSES: dict[str, dict[str, str | None]] = {}
for _page in PAGES.values():
    for _class, _names in _page.items():
        CLASSES.setdefault(_class, {}).update(_names)

# For each class of the pages, the classes here that have all of its methods and attributes.
FACES = {
    "tf.distribute.Strategy": [
        "rx.Strategy",
        "rx.OneDeviceStrategy",
        "rx.MirroredStrategy",
        "rx.experimental.CentralStorageStrategy",
        "rx.MultiWorkerMirroredStrategy",
        "rx.experimental.MultiWorkerMirroredStrategy",
    ],
    "tf.distribute.experimental.MultiWorkerMirroredStrategy": [
        "rx.experimental.MultiWorkerMirroredStrategy",
        "rx.MultiWorkerMirroredStrategy",
    ],
    "tf.compat.v1.distribute.OneDeviceStrategy": [
        "rx.compat.v1.OneDeviceStrategy",
        "rx.compat.v1.Strategy",
        "rx.compat.v1.MirroredStrategy",
        "rx.compat.v1.experimental.CentralStorageStrategy",
        "rx.compat.v1.experimental.MultiWorkerMirroredStrategy",
    ],
    "tf.compat.v1.distribute.StrategyExtended": [
        "rx.StrategyExtended",
        "rx.compat.v1.StrategyExtended",
    ],
}

# A strategy is made of parts, so this one cannot be left out. Nothing else is asked for besides.
REQUIRED_BESIDES = {
    "tf.compat.v1.distribute.StrategyExtended(container_strategy)": {"topology"},
}


@dataclass(frozen=True)
class Row:
    """A row of a table: what is there, and where it is here."""

    there: str
    paths: tuple[str, ...]

    @property
    def only_here(self) -> bool:
        return self.there == "none"


def section(document: str, heading: str) -> str:
    """What is below a heading of the third level, up to the next heading."""
    found = re.search(rf"^### {re.escape(heading)}\n(.*?)(?=^##|\Z)", document, re.M | re.S)
    return found[1] if found else ""


def rows(document: str, heading: str) -> list[Row]:
    """The rows of the table in a section, without its head."""
    lines = re.findall(r"^\|(.*)\|$", section(document, heading), re.M)
    cells = [[cell.strip() for cell in line.split("|")] for line in lines[2:]]
    return [Row(there.strip("`"), tuple(re.findall(r"`(.+?)`", here))) for there, here, _ in cells]


def name_of(there: str, heading: str) -> str:
    """The name of the pages that a row is about."""
    name = there.partition("(")[0]
    return "__init__" if name == heading else name


def resolve(path: str) -> Any:
    first, *rest = path.split(".")
    assert first == "rx"
    thing: Any = rx
    for part in rest:
        thing = getattr(thing, part)
    return thing


def parameters_of(there: str) -> list[tuple[str, Any]]:
    """Names and defaults of a signature as the pages write it; `inspect.Parameter.empty` for none.

    An enumeration of `tf.distribute` stands for the one here.
    """
    arguments = ast.parse(f"def f({there.partition('(')[2]}: ...").body[0].args  # pyright: ignore

    def value(default: ast.expr) -> Any:
        text = ast.unparse(default)
        if text.startswith("tf.distribute."):
            return resolve(text.replace("tf.distribute", "rx", 1))
        return ast.literal_eval(default)

    defaults = [value(default) for default in arguments.defaults]
    required = [inspect.Parameter.empty] * (len(arguments.args) - len(defaults))
    names = [argument.arg for argument in arguments.args]
    return list(zip(names, [*required, *defaults], strict=True))


def differences(there: str | None, path: str) -> list[str]:
    """In what the thing at `path` differs from a signature; None is that of an attribute."""
    try:
        thing = resolve(path)
    except AttributeError as error:
        return [f"{path} does not resolve: {error}"]
    if there is None:
        return [] if isinstance(thing, property) else [f"{path} is no property"]
    if not callable(thing):
        return [f"{path} is {thing!r}, and cannot be called"]
    actual = list(inspect.signature(thing).parameters.values())
    if not inspect.isclass(thing):
        actual = actual[1:]  # self
    wanted = parameters_of(there)
    found = []
    for index, (name, default) in enumerate(wanted):
        if index >= len(actual) or actual[index].name != name:
            return [f"{path} has no parameter {name!r} in place {index + 1}"]
        if actual[index].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            found.append(f"{name!r} of {path} is {actual[index].kind.description}")
        if not same(actual[index].default, default):
            found.append(f"{name!r} of {path} is {actual[index].default!r}, not {default!r}")
    for further in actual[len(wanted) :]:
        allowed = further.name in REQUIRED_BESIDES.get(there, ())
        if further.default is inspect.Parameter.empty and not (
            allowed and further.kind is inspect.Parameter.KEYWORD_ONLY
        ):
            found.append(f"{further.name!r} of {path} has to be given, and is not there")
    return found


def same(actual: Any, default: Any) -> bool:
    return type(actual) is type(default) and actual == default  # True is not 1


def problems(document: str, heading: str, names: Names) -> list[str]:
    """What is wrong with the table of a class."""
    table = rows(document, heading)
    found = [problem for name in names for problem in problems_of_name(table, heading, name, names)]
    found += [f"there is no {row.there}" for row in unknown(table, heading, names)]
    return found + [
        problem for row in table for path in row.paths for problem in problems_of(row, path, names)
    ]


def problems_of_name(table: list[Row], heading: str, name: str, names: Names) -> list[str]:
    about = [row for row in table if name_of(row.there, heading) == name]
    if len(about) != 1:
        return [f"{len(about)} rows are about {name}"]
    wanted = names[name] or name
    if about[0].there != wanted:
        return [f"the row says {about[0].there}, and the page {wanted}"]
    return [] if about[0].paths else [f"the row of {name} does not say where it is here"]


def unknown(table: list[Row], heading: str, names: Names) -> list[Row]:
    return [row for row in table if not row.only_here and name_of(row.there, heading) not in names]


def problems_of(row: Row, path: str, names: Names) -> list[str]:
    """What is wrong with one path of a row."""
    if row.only_here:
        return differences(None, path)
    name = row.there.partition("(")[0].rpartition(".")[2]
    if path.rpartition(".")[2] != name:
        return [f"{path} is not called {name}"]
    return differences(None if names.get(row.there, "") is None else row.there, path)


TABLES = {heading: rows(DOCUMENT.read_text(), heading) for heading in CLASSES}


def with_ids(cases: list[tuple[str, ...]]) -> list[Any]:
    return [pytest.param(*case, id=" ".join(case)) for case in cases]


@pytest.mark.parametrize(
    ("heading", "name"), with_ids([(c, name) for c in CLASSES for name in CLASSES[c]])
)
def test_every_name_has_its_row(heading, name):
    assert problems_of_name(TABLES[heading], heading, name, CLASSES[heading]) == []


@pytest.mark.parametrize("heading", CLASSES)
def test_no_row_is_about_a_name_that_is_not_there(heading):
    assert unknown(TABLES[heading], heading, CLASSES[heading]) == []


@pytest.mark.parametrize(
    ("heading", "there", "path"),
    with_ids([(c, row.there, path) for c in TABLES for row in TABLES[c] for path in row.paths]),
)
def test_what_the_table_names_is_here_and_called_the_same_way(heading, there, path):
    assert problems_of(Row(there, (path,)), path, CLASSES[heading]) == []


@pytest.mark.parametrize(
    ("heading", "here", "name"),
    with_ids([(c, here, name) for c in CLASSES for here in FACES[c] for name in CLASSES[c]]),
)
def test_every_class_has_every_name(heading, here, name):
    if name == "__init__":
        assert inspect.isclass(resolve(here))  # each has arguments of its own
    else:
        assert differences(CLASSES[heading][name], f"{here}.{name}") == []


@pytest.mark.parametrize(
    ("heading", "here"), with_ids([(c, here) for c in CLASSES for here in FACES[c]])
)
def test_the_section_names_every_class_that_it_is_for(heading, here):
    text = section(DOCUMENT.read_text(), heading)
    assert re.search(rf"`{re.escape(here)}[`.]", text)


def test_both_faces_have_one_class_for_what_extends_a_strategy():
    assert rx.compat.v1.StrategyExtended is rx.StrategyExtended


# The checks themselves: a table that is right, and what is said of one that is not.

MADE_UP: Names = {
    "__init__": "tf.Made(extended)",
    "extended": None,
    "reduce": "reduce(reduce_op, value, axis)",
    "run": "run(fn, args=(), kwargs=None, options=None)",
}
RIGHT = """
### tf.Made

Some words, and | a line | that is no row.

| there | here | what differs, and why |
|---|---|---|
| `tf.Made(extended)` | `rx.Made` | |
| `extended` | `rx.Strategy.extended` | |
| `reduce(reduce_op, value, axis)` | `rx.Strategy.reduce` | Differs in `nothing`. |
| `run(fn, args=(), kwargs=None, options=None)` | `rx.Strategy.run`, `rx.compat.v1.Strategy.run` | |
| none | `rx.Strategy.topology` | |

### tf.Other

| `lost()` | `rx.lost` | |
"""


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(rx, "Made", rx.Strategy, raising=False)


@pytest.mark.usefixtures("made")
def test_a_right_table_passes():
    assert len(rows(RIGHT, "tf.Made")) == 5
    assert problems(RIGHT, "tf.Made", MADE_UP) == []


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("kwargs=None, options", "kwargs=(), options", "the page run(fn, args=(), kwargs=None"),
        ("kwargs=None, options", "kwargs=(), options", "'kwargs' of rx.Strategy.run is None"),
        ("args=(), kwargs", "args=[], kwargs", "'args' of rx.Strategy.run is (), not []"),
        ("(reduce_op, value, axis)", "(value, reduce_op, axis)", "no parameter 'value' in place 1"),
        ("(reduce_op, value, axis)", "(reduce_op, value)", "'axis' of rx.Strategy.reduce has to"),
        ("(reduce_op, value, axis)", "(reduce_op, value, axis, k)", "no parameter 'k' in place 4"),
        (
            "value, axis)",
            "value, axis=None)",
            "'axis' of rx.Strategy.reduce is <class 'inspect._em",
        ),
        ("`rx.Strategy.reduce`", "`rx.compat.v1.Strategy.reduce`", "'axis' of rx.compat.v1"),
        ("`rx.Strategy.reduce`", "`rx.Strategy.gather`", "rx.Strategy.gather is not called reduce"),
        ("`rx.Strategy.reduce`", "`rx.Strategies.reduce`", "rx.Strategies.reduce does not resolve"),
        ("`rx.Strategy.reduce`", "as there", "the row of reduce does not say where"),
        ("| `reduce(reduce_op", "| `reduces(reduce_op", "0 rows are about reduce"),
        ("| `reduce(reduce_op", "| `reduces(reduce_op", "there is no reduces(reduce_op"),
        ("| none |", "| `extended` |", "2 rows are about extended"),
        ("| none |", "| `topology` |", "there is no topology"),
        ("`rx.Strategy.topology`", "`rx.Strategy.typology`", "typology does not resolve"),
        ("| `extended` |", "| `extended()` |", "the row says extended(), and the page extended"),
        ("| `extended` |", "| `extended()` |", "rx.Strategy.extended is <property"),
        ("tf.Made(extended)` |", "tf.Made()` |", "'extended' of rx.Made has to be given"),
        ("### tf.Made", "### tf.Mode", "0 rows are about run"),
    ],
)
def test_a_wrong_table_is_told(right, wrong, said):
    assert right in RIGHT
    found = problems(RIGHT.replace(right, wrong, 1), "tf.Made", MADE_UP)
    assert any(said in problem for problem in found), found


def test_a_method_in_the_place_of_an_attribute_is_told():
    assert differences(None, "rx.Strategy.run") == ["rx.Strategy.run is no property"]


def test_a_parameter_by_keyword_only_is_told(monkeypatch):
    monkeypatch.setattr(rx.Strategy, "run", lambda self, fn, *, args=(): fn)
    found = differences("run(fn, args=())", "rx.Strategy.run")
    assert found == ["'args' of rx.Strategy.run is keyword-only"]


def test_a_default_of_another_enumeration_is_told(monkeypatch):
    there = CLASSES["tf.compat.v1.distribute.OneDeviceStrategy"]["make_input_fn_iterator"]
    path = "rx.compat.v1.Strategy.make_input_fn_iterator"
    for default, told in [(rx.InputReplicationMode.PER_WORKER, 0), ("PER_WORKER", 1)]:
        monkeypatch.setattr(
            rx.compat.v1.Strategy,
            "make_input_fn_iterator",
            lambda self, input_fn, replication_mode=default: None,
        )
        assert len(differences(there, path)) == told
