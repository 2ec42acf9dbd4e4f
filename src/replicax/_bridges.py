"""Other libraries whose variables take part: each has a bridge, loaded once the library is.

Nothing here imports these libraries. Bridges are called in four situations: when a scope is entered
or left; around every function that replicas run or that is traced or differentiated; to find the
variable that stands for one of the library's; and to find what a compiled program depends on.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

from replicax import _context

if TYPE_CHECKING:
    from replicax.variables import Variable

_MODULES = {"keras": "replicax.integrations.keras", "flax.nnx": "replicax.integrations.flax"}

# A bridge's notes on one compiled function, kept between its calls, under keys of its own.
Memory: TypeAlias = dict[object, Any]


class Bridge(Protocol):
    """The way in which one library takes part."""

    def follow(self) -> None:
        """Note that another strategy, or none, has become current."""
        ...

    def surround(self, fn: Callable[..., object]) -> Callable[..., object]:
        """Return the function to call in place of a user's function, inside its context."""
        ...

    def suspended(self) -> AbstractContextManager[object]:
        """Return a context in which other code may use the same objects.

        It is entered while an eager replica waits and, in a program, while the replicas run.
        """
        ...

    def variable(self, value: Any) -> Variable | None:
        """Return the variable that stands for `value`, if that is one of the library's."""
        ...

    def fingerprint(
        self, fn: Callable[..., object], leaves: Sequence[object], memory: Memory
    ) -> Hashable:
        """Return the state, other than arrays, on which a program of `fn` for these leaves depends.

        This is called before every call of a compiled function, to which `memory` belongs.
        """
        ...

    def examine(self, constants: Sequence[object], variables: Sequence[Variable]) -> None:
        """Check the constants of a program that uses these variables; refuse wrong ones."""
        ...


_bridges: dict[str, Bridge] = {}


def _loaded() -> list[Bridge]:
    if len(_bridges) < len(_MODULES):
        for library, module in _MODULES.items():
            if library in sys.modules and library not in _bridges:
                _bridges[library] = importlib.import_module(module).bridge()
    return list(_bridges.values())


def take_back(library: str) -> Bridge | None:
    """Forget the bridge of a library, and return it; the next scope loads another one."""
    return _bridges.pop(library, None)


def load() -> None:
    """Load the bridges of the imported libraries, before arguments are flattened."""
    _loaded()


def follow() -> None:
    """Tell the bridges that another strategy has become current."""
    if _late_imports not in sys.meta_path:
        sys.meta_path.insert(0, _late_imports)
    for bridge in _loaded():
        bridge.follow()


def surrounded(fn: Callable[..., object]) -> Callable[..., Any]:
    """Return `fn` wrapped by the bridges, so that variables of other libraries work in it."""
    for bridge in _loaded():
        fn = bridge.surround(fn)
    return fn


def suspended() -> AbstractContextManager[object]:
    """Return a context in which other code may use the same objects."""
    bridges = _loaded()
    if not bridges:
        return nullcontext()
    stack = ExitStack()
    for bridge in bridges:
        stack.enter_context(bridge.suspended())
    return stack


def variable_of(value: object) -> Any:
    """Return the variable that stands for one of another library, and anything else unchanged."""
    for bridge in _loaded():
        found = bridge.variable(value)
        if found is not None:
            return found
    return value


def fingerprint(
    fn: Callable[..., object], leaves: Sequence[object], memory: Memory
) -> tuple[Hashable, ...]:
    """Return the state of other libraries on which a program of `fn` depends."""
    return tuple([bridge.fingerprint(fn, leaves, memory) for bridge in _loaded()])


def examine(constants: Sequence[object], variables: Sequence[Variable]) -> None:
    """Refuse constants of a program that are in fact variables which tracing did not find."""
    for bridge in _loaded():
        bridge.examine(constants, variables)


@final
class _LateImports(MetaPathFinder):
    """A hook for libraries imported after a scope was entered, which nothing else would notice."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname in _MODULES else None
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenFollow(spec.loader)
        return spec


@final
class _ThenFollow(Loader):
    """A loader that delegates to another loader, and then has the module's bridge follow."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if _context.current().strategy is not None:
            follow()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_late_imports = _LateImports()
