"""The outcome of restoring a checkpoint, for its values and for the objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import final

from replicax.checkpoint._entries import Deferred, joined
from replicax.errors import CheckpointMismatch
from replicax.variables import Variable

_SHOWN = 8


@final
class RestoreReport:
    """The outcome of `Checkpoint.restore`. Names are those of objects and of their entries.

    `path` is that of the checkpoint, or None if there was none to restore. The report is updated
    when entries that did not exist yet are made, and when attributes of the checkpoint are set.
    """

    def __init__(
        self,
        path: str | None,
        restored: Sequence[str] = (),
        unused: Sequence[str] = (),
        missing: Sequence[str] = (),
        deferred: Sequence[Deferred] = (),
    ) -> None:
        self.path = path
        self._missing = tuple(missing)
        self._restored = tuple(restored)
        self._unused = tuple(unused)
        self._later = tuple(deferred)

    @property
    def restored(self) -> tuple[str, ...]:
        """The names that have been restored, including deferred ones made since."""
        return (*self._restored, *_in_full((each, each.taken) for each in self._made))

    @property
    def deferred(self) -> tuple[str, ...]:
        """The entries that are restored once their object makes them, such as optimizer slots."""
        return _in_full((each, each.waiting) for each in self._waiting)

    @property
    def unused(self) -> tuple[str, ...]:
        """The names that the checkpoint has, but no object has so far.

        If the `rx.Checkpoint` has no attribute of that name yet, they are restored when it is set:
        `checkpoint.model = model`.
        """
        left = ((each, each.waiting.keys() - each.taken) for each in self._made)
        return (*self._unused, *_in_full(left))

    @property
    def missing(self) -> tuple[str, ...]:
        """The names that objects have, but the checkpoint does not: their values are unchanged."""
        return (*self._missing, *_in_full((each, each.lacking) for each in self._made))

    def unused_under(self, name: str) -> list[str]:
        """Return the values that an object of this name would get if it were added now."""
        return [key for key in self._unused if key == name or key.startswith(f"{name}/")]

    def learn(self, variables: Mapping[Variable, str]) -> None:
        """Pass the names of further variables on to the deferred values."""
        for each in self._waiting:
            each.learn(variables)

    def extend(self, name: str, later: RestoreReport) -> None:
        """Add the outcome of a later restore for the object `name`."""
        done = {*later._restored, *_in_full((each, each.waiting) for each in later._later)}
        self._restored += later._restored
        self._later += later._later
        self._unused = tuple(key for key in self._unused if key not in done)
        others = (key for key in self._missing if key != name and not key.startswith(f"{name}/"))
        self._missing = (*others, *later._missing)

    @property
    def _waiting(self) -> list[Deferred]:
        """The deferred values of objects that have not made all their entries yet."""
        return [each for each in self._later if not each.finished]

    @property
    def _made(self) -> list[Deferred]:
        """The deferred values of objects that have made all their entries since."""
        return [each for each in self._later if each.finished]

    def assert_consumed(self) -> RestoreReport:
        """Raise unless everything in the checkpoint, and every object, has a match."""
        self.assert_existing_objects_matched()
        if self.unused or self.deferred:
            raise CheckpointMismatch(
                f"Not all of {self.path} has been used.{_listed('No object wants', self.unused)}"
                f"{_listed('Not made yet are', self.deferred)} Give the checkpoint all objects "
                "that it was saved with, and check after the first step."
            )
        return self

    def assert_existing_objects_matched(self) -> RestoreReport:
        """Raise if the checkpoint has nothing for an object."""
        if self.path is None:
            raise CheckpointMismatch(
                "Nothing has been restored: `restore` was given None, as there was no checkpoint. "
                "Ask the report only where there was one."
            )
        if self.missing:
            raise CheckpointMismatch(
                f"{self.path} does not have everything.{_listed('It lacks', self.missing)}"
                f"{_listed('It also has', self.unused)} Look for objects that have another "
                "name than when it was saved."
            )
        return self

    def expect_partial(self) -> RestoreReport:
        """Return the report; in TensorFlow this silences warnings, but here there are none."""
        return self

    def __repr__(self) -> str:
        if self.path is None:
            return "<RestoreReport: there was no checkpoint to restore>"
        parts = [f"restored {len(self.restored)} of {self._total} from {self.path}"]
        for what in ("deferred", "unused", "missing"):
            names = getattr(self, what)
            if names:
                parts.append(f"{what}: {_names(names)}")
        return f"<RestoreReport: {'; '.join(parts)}>"

    @property
    def _total(self) -> int:
        return len(self.restored) + len(self.deferred) + len(self.unused)


def _in_full(names: Iterable[tuple[Deferred, Iterable[str]]]) -> tuple[str, ...]:
    return tuple(sorted(joined(each.place, name) for each, own in names for name in own))


def _listed(words: str, names: Sequence[str]) -> str:
    return f" {words} {_names(names)}." if names else ""


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
