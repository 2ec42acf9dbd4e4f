"""Every name of the five reference pages is here, is called the same way, and is in the docs.

docs/from_tf_distribute.md has a table for each class of the pages. The tables are read, and
compared with the pages (`reference_names.py`) and with the library.
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

DOCUMENT = (Path(__file__).parents[2] / "docs" / "from_tf_distribute.md").read_text()

EMPTY = inspect.Parameter.empty
Names = Mapping[str, str | None]  # how each name is called; None for an attribute

# Of the two pages about one class, one has two methods more.
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
        "rx.TPUStrategy",
        "rx.experimental.TPUStrategy",
        "rx.ParameterServerStrategy",
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
REQUIRED_BESIDES = {"tf.compat.v1.distribute.StrategyExtended(container_strategy)": "topology"}


@dataclass(frozen=True)
class Row:
    """A row of a table: what is there, and where it is here."""

    there: str
    paths: tuple[str, ...]

    @property
    def only_here(self) -> bool:
        return self.there == "none"

    def name(self, heading: str) -> str:
        """The name on the page that it is about."""
        name = self.there.partition("(")[0]
        return "__init__" if name == heading else name


def section(document: str, heading: str) -> str:
    """Return the text below a heading of the third level, up to the next heading."""
    found = re.search(rf"^### {re.escape(heading)}\n(.*?)(?=^##|\Z)", document, re.M | re.S)
    return found[1] if found else ""


def rows(document: str, heading: str) -> list[Row]:
    """The rows of the table in a section, without its head."""
    lines = re.findall(r"^\|(.*)\|$", section(document, heading), re.M)
    cells = [[cell.strip() for cell in line.split("|")] for line in lines[2:]]
    return [Row(there.strip("`"), tuple(re.findall(r"`(.+?)`", here))) for there, here, _ in cells]


def resolve(path: str) -> Any:
    first, *rest = path.split(".")
    assert first == "rx"
    thing: Any = rx
    for part in rest:
        thing = getattr(thing, part)
    return thing


def parameters_of(there: str) -> list[tuple[str, Any]]:
    """Names and defaults of a signature as the pages write it.

    An enumeration of `tf.distribute` stands for the one here.
    """
    arguments = ast.parse(f"def f({there.partition('(')[2]}: ...").body[0].args

    def value(default: ast.expr) -> Any:
        text = ast.unparse(default)
        if text.startswith("tf.distribute."):
            return resolve(text.replace("tf.distribute", "rx", 1))
        return ast.literal_eval(default)

    names = [argument.arg for argument in arguments.args]
    defaults = [value(default) for default in arguments.defaults]
    return list(zip(names, [EMPTY] * (len(names) - len(defaults)) + defaults, strict=True))


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
        actual = actual[1:]  # without self
    wanted = parameters_of(there)
    found = []
    for index, (name, default) in enumerate(wanted):
        if index >= len(actual) or actual[index].name != name:
            return [f"{path} has no parameter {name!r} in place {index + 1}"]
        if actual[index].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            found.append(f"{name!r} of {path} is {actual[index].kind.description}")
        given = actual[index].default
        if type(given) is not type(default) or given != default:  # as True is 1
            found.append(f"{name!r} of {path} is {given!r}, not {default!r}")
    for further in actual[len(wanted) :]:
        permitted = further.name == REQUIRED_BESIDES.get(there)
        if further.default is EMPTY and not (permitted and further.kind is further.KEYWORD_ONLY):
            found.append(f"{further.name!r} of {path} must be given, and is not there")
    return found


def wrong_with_name(table: list[Row], heading: str, name: str, names: Names) -> list[str]:
    """Return the faults of a name's row."""
    about = [row for row in table if row.name(heading) == name]
    if len(about) != 1:
        return [f"{len(about)} rows are about {name}"]
    wanted = names[name] or name
    if about[0].there != wanted:
        return [f"the row says {about[0].there}, and the page {wanted}"]
    return [] if about[0].paths else [f"the row of {name} does not say where it is here"]


def wrong_with_path(there: str, path: str, names: Names) -> list[str]:
    """Return the faults of a path that a row gives."""
    if there == "none":
        return [problem for problem in differences(None, path) if "resolve" in problem]
    name = there.partition("(")[0].rpartition(".")[2]
    if path.rpartition(".")[2] != name:
        return [f"{path} is not called {name}"]
    is_attribute = there in names and names[there] is None
    return differences(None if is_attribute else there, path)


def unknown(table: list[Row], heading: str, names: Names) -> list[str]:
    """The rows about what the page does not have."""
    return [row.there for row in table if not row.only_here and row.name(heading) not in names]


def wrong(document: str, heading: str, names: Names) -> list[str]:
    """All that is wrong with the table of a class."""
    table = rows(document, heading)
    return [
        *(problem for name in names for problem in wrong_with_name(table, heading, name, names)),
        *(f"the page has no {there}" for there in unknown(table, heading, names)),
        *(
            problem
            for row in table
            for path in row.paths
            for problem in wrong_with_path(row.there, path, names)
        ),
    ]


TABLES = {heading: rows(DOCUMENT, heading) for heading in CLASSES}


def named(*cases: tuple[str, ...]) -> list[Any]:
    return [pytest.param(*case, id=" ".join(case)) for case in cases]


@pytest.mark.parametrize(
    ("heading", "name"), named(*((c, name) for c in CLASSES for name in CLASSES[c]))
)
def test_every_name_has_its_row(heading, name):
    assert wrong_with_name(TABLES[heading], heading, name, CLASSES[heading]) == []


@pytest.mark.parametrize("heading", CLASSES)
def test_no_row_is_about_a_name_that_is_not_there(heading):
    assert unknown(TABLES[heading], heading, CLASSES[heading]) == []


@pytest.mark.parametrize(
    ("heading", "there", "path"),
    named(*((c, row.there, path) for c in TABLES for row in TABLES[c] for path in row.paths)),
)
def test_what_the_table_names_is_called_as_there(heading, there, path):
    assert wrong_with_path(there, path, CLASSES[heading]) == []


@pytest.mark.parametrize(
    ("heading", "here", "name"),
    named(
        *((c, here, name) for c in CLASSES for here in FACES[c] for name in CLASSES[c]),
    ),
)
def test_every_class_has_every_name(heading, here, name):
    if name == "__init__":
        assert inspect.isclass(resolve(here))  # each has arguments of its own
    else:
        assert differences(CLASSES[heading][name], f"{here}.{name}") == []


@pytest.mark.parametrize(
    ("heading", "here"), named(*((c, here) for c in CLASSES for here in FACES[c]))
)
def test_the_section_names_every_class_that_it_is_for(heading, here):
    assert re.search(rf"`{re.escape(here)}[`.]", section(DOCUMENT, heading))


@pytest.mark.parametrize("page", PAGES)
def test_pages_about_one_class_agree(page):
    for heading, names in PAGES[page].items():
        assert names.items() <= CLASSES[heading].items()


def test_both_faces_have_one_class_for_what_extends_a_strategy():
    assert rx.compat.v1.StrategyExtended is rx.StrategyExtended
    topology = inspect.signature(rx.StrategyExtended).parameters["topology"]
    assert (topology.kind, topology.default) == (inspect.Parameter.KEYWORD_ONLY, EMPTY)


# The checks themselves: a table that is right, and what they say of one that is not.

MADE_UP: Names = {
    "__init__": "tf.distribute.Strategy(extended)",
    "extended": None,
    "reduce": "reduce(reduce_op, value, axis)",
    "run": "run(fn, args=(), kwargs=None, options=None)",
}
RIGHT = """
### tf.distribute.Strategy

Some words, and | a line | that is no row.

| there | here | what differs, and why |
|---|---|---|
| `tf.distribute.Strategy(extended)` | `rx.Strategy` | |
| `extended` | `rx.Strategy.extended` | |
| `reduce(reduce_op, value, axis)` | `rx.Strategy.reduce` | Differs in `nothing`. |
| `run(fn, args=(), kwargs=None, options=None)` | `rx.Strategy.run`, `rx.compat.v1.Strategy.run` | |
| none | `rx.Strategy.topology` | |

### tf.distribute.Other

| there | here | what differs, and why |
|---|---|---|
| `lost()` | `rx.lost` | |
"""


def test_a_right_table_passes():
    assert len(rows(RIGHT, "tf.distribute.Strategy")) == 5
    assert wrong(RIGHT, "tf.distribute.Strategy", MADE_UP) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("kwargs=None, options", "kwargs=(), options", "the page run(fn, args=(), kwargs=None"),
        ("kwargs=None, options", "kwargs=(), options", "'kwargs' of rx.Strategy.run is None"),
        ("args=(), kwargs", "args=[], kwargs", "'args' of rx.Strategy.run is (), not []"),
        ("(reduce_op, value, axis)", "(value, reduce_op, axis)", "no parameter 'value' in place 1"),
        ("(reduce_op, value, axis)", "(reduce_op, value)", "'axis' of rx.Strategy.reduce must"),
        ("(reduce_op, value, axis)", "(reduce_op, value, axis, k)", "no parameter 'k' in place 4"),
        ("value, axis)", "value, axis=None)", "'axis' of rx.Strategy.reduce is <class"),
        ("`rx.Strategy.reduce`", "`rx.compat.v1.Strategy.reduce`", "'axis' of rx.compat.v1"),
        ("`rx.Strategy.reduce`", "`rx.Strategy.gather`", "rx.Strategy.gather is not called reduce"),
        ("`rx.Strategy.reduce`", "`rx.Strategies.reduce`", "rx.Strategies.reduce does not resolve"),
        ("`rx.Strategy.reduce`", "as there", "the row of reduce does not say where"),
        ("| `reduce(reduce_op", "| `reduces(reduce_op", "0 rows are about reduce"),
        ("| `reduce(reduce_op", "| `reduces(reduce_op", "the page has no reduces(reduce_op"),
        ("| none |", "| `extended` |", "2 rows are about extended"),
        ("| none |", "| `topology` |", "the page has no topology"),
        ("`rx.Strategy.topology`", "`rx.Strategy.typology`", "typology does not resolve"),
        ("| `extended` |", "| `extended()` |", "the row says extended(), and the page extended"),
        ("| `extended` |", "| `extended()` |", "rx.Strategy.extended is <property"),
        ("Strategy(extended)` |", "Strategy()` |", "'extended' of rx.Strategy must be given"),
        ("### tf.distribute.Strategy", "### Strategy", "0 rows are about run"),
    ],
)
def test_a_wrong_table_is_told(old, new, said):
    assert old in RIGHT
    found = wrong(RIGHT.replace(old, new, 1), "tf.distribute.Strategy", MADE_UP)
    assert any(said in problem for problem in found), found


def test_a_method_in_the_place_of_an_attribute_is_told():
    assert differences(None, "rx.Strategy.run") == ["rx.Strategy.run is no property"]


def test_a_parameter_by_keyword_only_is_told(monkeypatch):
    monkeypatch.setattr(rx.Strategy, "run", lambda self, fn, *, args=(): None)
    found = differences("run(fn, args=())", "rx.Strategy.run")
    assert found == ["'args' of rx.Strategy.run is keyword-only"]


@pytest.mark.parametrize(
    ("default", "told"), [(rx.InputReplicationMode.PER_WORKER, 0), ("PER_WORKER", 1)]
)
def test_a_default_that_is_no_member_of_the_enumeration_is_told(monkeypatch, default, told):
    there = CLASSES["tf.compat.v1.distribute.OneDeviceStrategy"]["make_input_fn_iterator"]
    monkeypatch.setattr(
        rx.compat.v1.Strategy,
        "make_input_fn_iterator",
        lambda self, input_fn, replication_mode=default: None,
    )
    assert len(differences(there, "rx.compat.v1.Strategy.make_input_fn_iterator")) == told
