"""What became of the values in a checkpoint, and of the objects that wanted them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from replicax.checkpoint._parts import Deferred, joined
from replicax.errors import CheckpointMismatch

_SHOWN = 8


@final
class RestoreReport:
    """What `Checkpoint.restore` did. Names are those of objects, and of what is in them.

    `path` is the checkpoint.
    """

    def __init__(
        self,
        path: str,
        restored: Sequence[str],
        unused: Sequence[str],
        missing: Sequence[str],
        deferred: Sequence[Deferred],
    ) -> None:
        self.path = path
        self._missing = tuple(missing)
        self._restored = tuple(restored)
        self._unused = tuple(unused)
        self._later = tuple(deferred)

    @property
    def restored(self) -> tuple[str, ...]:
        """What has been restored, with what was deferred and has been made since."""
        return (*self._restored, *_in_full((each, each.taken) for each in self._made))

    @property
    def deferred(self) -> tuple[str, ...]:
        """What is restored when its object makes it, as an optimizer does in its first step."""
        return _in_full((each, each.waiting) for each in self._later if not each.settled)

    @property
    def unused(self) -> tuple[str, ...]:
        """What the checkpoint has, and no object wants."""
        left = ((each, each.waiting.keys() - each.taken) for each in self._made)
        return (*self._unused, *_in_full(left))

    @property
    def missing(self) -> tuple[str, ...]:
        """What objects have, and the checkpoint does not: it is as it was before."""
        return (*self._missing, *_in_full((each, each.lacking) for each in self._made))

    @property
    def _made(self) -> list[Deferred]:
        """What was deferred, of objects that have made all their parts since."""
        return [each for each in self._later if each.settled]

    def assert_consumed(self) -> RestoreReport:
        """Raises unless everything in the checkpoint, and every object, has found its match."""
        self.assert_existing_objects_matched()
        if self.unused or self.deferred:
            raise CheckpointMismatch(
                f"Not all of {self.path} has been used.{_listed('No object wants', self.unused)}"
                f"{_listed('Not made yet are', self.deferred)} Give the checkpoint all objects "
                "that it was saved with, and check after the first step."
            )
        return self

    def assert_existing_objects_matched(self) -> RestoreReport:
        """Raises if an object has found nothing in the checkpoint."""
        if self.missing:
            raise CheckpointMismatch(
                f"{self.path} does not have everything.{_listed('It lacks', self.missing)}"
                f"{_listed('It has, for nobody,', self.unused)} Look for objects that have another "
                "name than when it was saved."
            )
        return self

    def expect_partial(self) -> RestoreReport:
        """For programs written for TensorFlow, where this silences warnings. Here are none."""
        return self

    def __repr__(self) -> str:
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
