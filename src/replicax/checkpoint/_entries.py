"""The named entries of objects in a checkpoint, and the handlers of their types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from replicax.checkpoint._manifest import ArrayFacts
from replicax.errors import CheckpointMismatch
from replicax.variables import Variable, WorkerParts

if TYPE_CHECKING:
    import jax

    from replicax._typing import Json
    from replicax.checkpoint._manifest import Plain

NameOf = Callable[[Variable], str | None]


@final
@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """An entry that is an array.

    Args:
      shape: The shape of the array, and of any replacement.
      dtype: The dtype of both.
      read: Returns its value, a NumPy or JAX array; if there are `parts`, this worker's part.
      write: Replaces the value, or this worker's part, with a NumPy array or random keys.
      variable: The variable whose value it is. Optimizers name its slots after it.
      lasting: Whether the memory that `read` returns is never changed.
      optional: Whether it may be missing, in a checkpoint or in the object, without an error.
      put_back: Undoes `write`, given what `read` returned before; None if changes are undone
        anyway, as those of variables are.
      parts: The parts that the workers hold; None if each of them holds the whole array.
    """

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[], Any]
    write: Callable[[Any], None]
    variable: Variable | None = None
    lasting: bool = False
    optional: bool = False
    put_back: Callable[[Any], None] | None = None
    parts: WorkerParts | None = None

    def facts(self, value: jax.Array | np.ndarray) -> ArrayFacts:
        """Return the facts about the array, given the `value` that `read` has returned."""
        facts = ArrayFacts.of(value, self.optional)
        if self.parts is None:
            return facts
        parts = self.parts if self.parts.count > 1 else None
        return replace(facts, shape=self.shape, parts=parts)


@final
@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A plain Python value: a number, a string, a boolean, or None."""

    read: Callable[[], Plain]
    write: Callable[[Plain], None]


@final
@dataclass(frozen=True, slots=True)
class PositionEntry:
    """The position of an iterator or the like, as JSON; each worker has its own.

    Args:
      read: Returns the position of this worker.
      write: Resumes from a position.
      shared: Whether the position of one worker is valid for all, because they read the same.
    """

    read: Callable[[], Json]
    write: Callable[[Json], None]
    shared: bool = False


Entry = ArrayEntry | ValueEntry | PositionEntry


@final
class Deferred:
    """Values for entries that an object does not have yet, kept until it has made them.

    Args:
      place: The name of the object in the checkpoint.
      values: The arrays, by their names in the object.
      variables: The names of variables in the checkpoint that the values are from.
    """

    def __init__(
        self,
        place: str,
        values: Mapping[str, jax.Array | np.ndarray],
        variables: Mapping[Variable, str],
    ) -> None:
        self.place = place
        self._variables = dict(variables)
        self.waiting = dict(values)
        self.taken: set[str] = set()
        self.lacking: set[str] = set()
        self.finished = False

    def name_of(self, variable: Variable) -> str | None:
        """Return the name of a variable in the checkpoint that the values are from."""
        return self._variables.get(variable)

    def learn(self, variables: Mapping[Variable, str]) -> None:
        """Note variables that were added to the checkpoint after it was restored."""
        self._variables |= variables

    def take(
        self, name: str, shape: tuple[int, ...], dtype: object
    ) -> jax.Array | np.ndarray | None:
        """Return the value for an entry that is being made, or None if there is none."""
        value = self.waiting.get(name)
        if value is None:
            self.lacking.add(name)
            return None
        if value.shape != tuple(shape) or value.dtype != dtype:
            raise CheckpointMismatch(
                f"{joined(self.place, name)!r} is {described(shape, dtype)} now, and was "
                f"{described(value.shape, value.dtype)} when the checkpoint was saved. Restore it "
                "into the program that it was saved by."
            )
        self.taken.add(name)
        return value

    def renamed(self, name_of: NameOf) -> dict[str, Any]:
        """Return the waiting values, renamed after what another checkpoint calls the variables."""
        return {self._renamed(name, name_of): value for name, value in self.waiting.items()}

    def _renamed(self, name: str, name_of: NameOf) -> str:
        owners = [each for each, old in self._variables.items() if name.endswith(f"/{old}")]
        if not owners:
            return name
        # The longest name wins where one name ends with another.
        owner = max(owners, key=lambda each: len(self._variables[each]))
        new = name_of(owner)
        return name if new is None else name.removesuffix(self._variables[owner]) + new

    def finish(self) -> None:
        """Note that all entries have been made: values that were not taken are unused."""
        self.finished = True
        self.waiting = dict.fromkeys(self.waiting)  # only the names are still needed


@final
@dataclass(frozen=True, slots=True)
class ObjectEntries:
    """The entries of an object.

    Args:
      entries: The entries, by name; the name is "" if the object itself is the entry.
      defer: Takes the saved values of entries that do not exist yet, and keeps them until they do.
        None if there are no such entries.
      deferred: The values that the object was given by `defer` and has not used so far.
      make: Makes the entries that do not exist yet, when a checkpoint has values for them. It takes
        the name of the object, and raises `CheckpointMismatch` if that is impossible.
    """

    entries: Mapping[str, Entry]
    defer: Callable[[Deferred], None] | None = None
    deferred: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[str], None] | None = None


class ListEntries(Protocol):
    def __call__(self, thing: Any, name_of: NameOf, /) -> ObjectEntries:
        """Take an object apart; `name_of` returns the name of a variable in the checkpoint."""
        ...


@final
@dataclass(frozen=True, slots=True)
class TypeHandler:
    """The handler of a type of objects, which enables checkpoints to hold them.

    Args:
      recognise: Tells whether an object is of this type, without importing its library.
      list_entries: Returns the entries of an object.
      names_variables: Whether the names of its entries contain those of variables.
    """

    recognise: Callable[[object], bool]
    list_entries: ListEntries
    names_variables: bool = False


_handlers: list[TypeHandler] = []


def register(handler: TypeHandler) -> None:
    """Register the handler of another type of objects."""
    _handlers.append(handler)


def handler_of(thing: object) -> TypeHandler | None:
    """Return the handler that was registered for an object."""
    return next((handler for handler in reversed(_handlers) if handler.recognise(thing)), None)


def joined(place: str, name: str) -> str:
    return f"{place}/{name}" if name else place


def described(shape: tuple[int, ...], dtype: object) -> str:
    name = dtype.name if isinstance(dtype, np.dtype) else str(dtype)
    return f"{name}{list(shape)}"
