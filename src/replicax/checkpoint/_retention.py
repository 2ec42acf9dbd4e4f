"""Retention: the choice of which checkpoints in a directory to keep."""

from __future__ import annotations

import json
import math
import numbers
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import final

from replicax._deprecation import frames_to_the_user
from replicax._describing import described
from replicax._plain_files import open_plain
from replicax.checkpoint import _files as files
from replicax.checkpoint._failures import reason
from replicax.errors import CheckpointError, InvalidArgument

_HOUR = 3600.0


@final
class Retention:
    """A rule that removes surplus checkpoints, but keeps one every few hours.

    Args:
      directory: The directory of the checkpoints.
      name: The beginning of their names.
      max_to_keep: The number of latest checkpoints to keep; None for all.
      hours: The number of hours after which one is kept for good; None for never.
    """

    def __init__(
        self, directory: Path, name: str, max_to_keep: int | None, hours: float | None
    ) -> None:
        number = isinstance(hours, numbers.Real) and not isinstance(hours, bool)
        if hours is not None and not (number and 0 < float(hours) < math.inf):
            raise InvalidArgument(
                f"`keep_checkpoint_every_n_hours` must be a positive number; got {hours!r}."
            )
        self._directory = directory
        self._name = name
        self._max_to_keep = max_to_keep
        self._hours = None if hours is None else float(hours)
        self._made = time.time()

    def managed(self) -> list[Path]:
        """Return the complete checkpoints, the latest last, without those kept for good."""
        kept = self._record().kept
        found = files.numbered(self._directory, self._name)
        return [path for number, path in found.items() if number not in kept]

    def apply(self) -> None:
        """Remove surplus checkpoints; called when another one is complete."""
        record = self._record()
        if self._max_to_keep is not None:
            for path in self.managed()[: -self._max_to_keep]:
                age = files.saved_at(path) - record.since
                if self._hours is not None and age >= self._hours * _HOUR:
                    record = record.with_another(path)
                else:
                    _remove(path)
        if self._hours is not None:
            record.write(self._file)

    @property
    def _file(self) -> Path:
        return self._directory / f"{self._name}.kept.json"

    def _record(self) -> _Record:
        """Read the record of earlier managers, possibly in other processes."""
        try:
            return _Record.read(self._file)
        except FileNotFoundError:
            return _Record(frozenset(), self._made)


@final
@dataclass(frozen=True, slots=True)
class _Record:
    """The record that the manager of a directory leaves for the next one.

    Args:
      kept: The numbers of checkpoints that are kept for good.
      since: The time when the last of these was saved, or the first manager was made.
    """

    kept: frozenset[int]
    since: float

    @classmethod
    def read(cls, file: Path) -> _Record:
        try:
            with open(open_plain(file, os.O_RDONLY)) as opened:
                content = json.load(opened)
            kept, since = content["kept"], content["since"]
            if not all(type(number) is int for number in kept) or type(since) not in (int, float):
                raise TypeError(f"it must have numbers, and has {described(content)}")
            return cls(frozenset(kept), float(since))
        except FileNotFoundError:
            raise
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise CheckpointError(
                f"{file} cannot be read: {reason(error)}. It says which checkpoints are kept for "
                "good; move these to another directory, and remove it."
            ) from error

    def with_another(self, path: Path) -> _Record:
        number = int(path.name.rpartition("-")[2])
        return _Record(self.kept | {number}, files.saved_at(path))

    def write(self, file: Path) -> None:
        new = file.with_name(f"{file.name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open(open_plain(new, flags), "w") as opened:
            json.dump({"kept": sorted(self.kept), "since": self.since}, opened)
        os.replace(new, file)


def _remove(path: Path) -> None:
    try:
        files.remove(path)
    except FileNotFoundError:
        pass  # another process has removed it
    except OSError as error:
        # The save has not failed: the new checkpoint is complete.
        warnings.warn(
            f"A checkpoint was written, but the old one {path} could not be removed: {error}. "
            "Remove it, or give `max_to_keep=None`.",
            RuntimeWarning,
            stacklevel=frames_to_the_user(),
        )
