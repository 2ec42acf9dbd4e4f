"""What a checkpoint holds of an object: parts, each under a name; and which objects have which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import numpy as np

from replicax.errors import CheckpointMismatch
from replicax.variables import Variable

NameOf = Callable[[Variable], str | None]


@final
@dataclass(frozen=True, slots=True)
class ArrayPart:
    """An array.

    Args:
      shape: Of the array, and of what can be put in its place.
      dtype: The same.
      read: Its value: of NumPy or of JAX.
      write: Puts another one in its place, of NumPy; keys of random numbers come as such.
      variable: Whose value it is. Optimizers name what they keep for a variable by its name.
      lasting: Whether the memory that `read` gives stays as it is.
      optional: Whether it may be lacking, in a checkpoint or in the object, without a word.
      put_back: Undoes `write`, and is given what `read` gave before; None for those whose changes
        are undone anyway, as those of variables are.
    """

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[], Any]
    write: Callable[[Any], None]
    variable: Variable | None = None
    lasting: bool = False
    optional: bool = False
    put_back: Callable[[Any], None] | None = None


@final
@dataclass(frozen=True, slots=True)
class ValuePart:
    """A plain Python value: a number, a word, a truth value."""

    read: Callable[[], Any]
    write: Callable[[Any], None]


@final
@dataclass(frozen=True, slots=True)
class PositionPart:
    """How far something has come, in what JSON can express; each worker has its own.

    Args:
      read: Where this worker's stands.
      write: Makes it go on from there.
      shared: Whether that of one worker can be given to any, because all read the same.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]
    shared: bool = False


Part = ArrayPart | ValuePart | PositionPart


@final
class Deferred:
    """Values for parts that an object does not have yet, kept until it has made them.

    Args:
      place: The name of the object in the checkpoint.
      values: The arrays, by their names in the object.
      variables: How variables were called in the checkpoint that it is from.
    """

    def __init__(
        self, place: str, values: Mapping[str, Any], variables: Mapping[Variable, str]
    ) -> None:
        self.place = place
        self._variables = dict(variables)
        self.waiting = dict(values)
        self.taken: set[str] = set()
        self.lacking: set[str] = set()
        self.settled = False

    def name_of(self, variable: Variable) -> str | None:
        """Return how a variable is called in the checkpoint that the values are from."""
        return self._variables.get(variable)

    def learn(self, variables: Mapping[Variable, str]) -> None:
        """Take note of variables that were given to the checkpoint after it was restored."""
        self._variables |= variables

    def take(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the value for a part that is being made; None if there is none."""
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
        """Return what waits, named after variables as another checkpoint calls them."""
        return {self._renamed(name, name_of): value for name, value in self.waiting.items()}

    def _renamed(self, name: str, name_of: NameOf) -> str:
        owners = [each for each, old in self._variables.items() if name.endswith(f"/{old}")]
        if not owners:
            return name
        # The longest, where the name of one ends with that of another.
        owner = max(owners, key=lambda each: len(self._variables[each]))
        new = name_of(owner)
        return name if new is None else name.removesuffix(self._variables[owner]) + new

    def settle(self) -> None:
        """Note that all parts have been made: what was not taken is not used."""
        self.settled = True
        self.waiting = dict.fromkeys(self.waiting)  # the names; the arrays are not needed any more


@final
@dataclass(frozen=True, slots=True)
class TakenApart:
    """What an object consists of.

    Args:
      parts: By name; that of an object with one part only is "".
      defer: Is given what a checkpoint has for parts that do not exist yet, and keeps it until
        they do. None if there are no such parts.
      deferred: What it was given, and has not used so far.
      make: Makes the parts that do not exist yet, when a checkpoint has something for them; it
        is given the name of the object, and raises `CheckpointMismatch` if that is impossible.
    """

    parts: Mapping[str, Part]
    defer: Callable[[Deferred], None] | None = None
    deferred: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[str], None] | None = None


class TakeApart(Protocol):
    def __call__(self, thing: Any, name_of: NameOf, /) -> TakenApart:
        """Take an object apart; `name_of` says how variables are called in the checkpoint."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of objects that checkpoints know.

    Args:
      recognise: Whether something is of this kind. It must not import the library that has it.
      take_apart: What it consists of.
      names_variables: Whether the names of its parts are made of those of variables.
    """

    recognise: Callable[[Any], bool]
    take_apart: TakeApart
    names_variables: bool = False


_kinds: list[Kind] = []


def register(kind: Kind) -> None:
    """Teach checkpoints another kind of objects."""
    _kinds.append(kind)


def kind_of(thing: Any) -> Kind | None:
    """Return the kind that was registered for an object."""
    return next((kind for kind in reversed(_kinds) if kind.recognise(thing)), None)


def joined(place: str, name: str) -> str:
    return f"{place}/{name}" if name else place


def described(shape: tuple[int, ...], dtype: Any) -> str:
    name = dtype.name if isinstance(dtype, np.dtype) else str(dtype)
    return f"{name}{list(shape)}"
