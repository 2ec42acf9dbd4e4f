"""`_process_state.py` lists all state of the whole process, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import replicax
from replicax import _process_state as listed  # which nothing else imports

SOURCE = Path(replicax.__file__).parent
MUTABLE = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
LOCKS = {"Condition", "Event", "Lock", "RLock", "Semaphore"}
WEAK = {"WeakKeyDictionary", "WeakSet", "WeakValueDictionary"}
OTHERS = {
    *("ContextVar", "Counter", "OrderedDict", "bytearray", "count", "defaultdict", "deque"),
    *("dict", "list", "local", "set"),
}
CACHES = {"cache", "cached", "lru_cache"}
CHANGES = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove"),
    *("setdefault", "update"),
}


def last_name(node: ast.AST | None) -> str:
    """Return `lru_cache` of `functools.lru_cache(maxsize=1)`."""
    if isinstance(node, ast.Call):
        node = node.func
    return getattr(node, "attr", None) or getattr(node, "id", "")


def modules() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(SOURCE.rglob("*.py")):
        parts = file.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        yield name, ast.parse(file.read_text())


def assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and value is not None:
                yield target.id, value


def attributes(made: ast.ClassDef) -> dict[str, ast.expr]:
    """Return what the `__init__` of a class assigns to attributes."""
    found = {}
    for method in made.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            for node in ast.walk(method):
                targets = node.targets if isinstance(node, ast.Assign) else ()
                for target in (*targets, getattr(node, "target", None)):
                    if isinstance(target, ast.Attribute) and getattr(node, "value", None):
                        found[target.attr] = node.value
    return found


def is_mutable(made: ast.ClassDef) -> bool:
    """Tell whether objects of a class have collections, or fields that can be set."""
    for decorator in made.decorator_list:
        if last_name(decorator) == "dataclass":
            settings = decorator.keywords if isinstance(decorator, ast.Call) else []
            return not any(setting.arg == "frozen" for setting in settings)
    values = attributes(made).values()
    return any(isinstance(v, MUTABLE) or last_name(v) in WEAK | OTHERS | LOCKS for v in values)


def found() -> dict[str, set[str]]:
    """Return the module-level names of each kind that can change."""
    kinds: dict[str, set[str]] = {"locks": set(), "others": set(), "caches": set()}
    for module, tree in modules():
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for name, value in assigned(tree):
            made_by = last_name(value) if isinstance(value, ast.Call) else ""
            made = classes.get(made_by)
            mutable = made is not None and is_mutable(made)
            kind = (
                "locks"
                if made_by in LOCKS
                else "others"
                if made_by in OTHERS | WEAK or isinstance(value, MUTABLE) or mutable
                else None
            )
            if made is not None and mutable:
                locks = [name for name, of in attributes(made).items() if last_name(of) in LOCKS]
                kinds["locks"] |= {f"{module}.{name}.{lock}" for lock in locks}
            if kind is not None and not (name.isupper() or name == "__all__"):
                kinds[kind].add(f"{module}.{name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                kinds["others"] |= {f"{module}.{name}" for name in node.names}
            for decorator in getattr(node, "decorator_list", ()):
                if last_name(decorator) in CACHES:
                    kinds["caches"].add(f"{module}.{node.name}")
    return kinds


def test_the_list_is_complete():
    kinds = found()
    assert kinds["locks"] == set(listed.LOCKS)
    assert kinds["caches"] <= listed.CACHES | listed.MADE_ONCE
    everything = kinds["caches"] | kinds["others"]
    parts = (set(listed.STATE), listed.CACHES, listed.MADE_ONCE)
    assert everything == set().union(*parts)
    assert len(everything) == sum(map(len, parts)), "a name is listed twice"


def test_there_is_not_more_of_it():
    assert len(listed.STATE) <= 18, "keep it in an object that the user holds"


def test_constants_are_not_changed():
    changed = []
    for module, tree in modules():
        constants = {name for name, _ in assigned(tree) if name.isupper()}
        for node in ast.walk(tree):
            owner = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value if node.func.attr in CHANGES else None
            elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                owner = node.value
            if isinstance(owner, ast.Name) and owner.id in constants:
                changed.append(f"{module}.{owner.id}")
    assert not changed
