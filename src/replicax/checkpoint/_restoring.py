"""Restoring: everything is read and checked before anything is changed, on all workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

from replicax import _context
from replicax.checkpoint import _files as files
from replicax.checkpoint._entries import described
from replicax.checkpoint._inventory import Inventory
from replicax.checkpoint._manifest import Manifest
from replicax.checkpoint._parts import read_arrays
from replicax.checkpoint._report import RestoreReport
from replicax.checkpoint._saving import finish_earlier
from replicax.checkpoint._workers import (
    all_gather,
    on_all_workers,
    this_worker,
    worker_count,
    worker_name,
)
from replicax.errors import CheckpointMismatch
from replicax.variables import Part, all_or_nothing

if TYPE_CHECKING:
    from replicax.checkpoint._entries import Deferred
    from replicax.checkpoint._manifest import Plain

Result = TypeVar("Result")

_SHOWN = 10  # names in a message


def restore(
    inventory: Inventory, path: Path, *, partial: bool, wanted: Collection[str] | None = None
) -> tuple[RestoreReport, Manifest]:
    """Restore all matching entries; return the report and the manifest of the checkpoint.

    Args:
      inventory: The objects.
      path: The checkpoint.
      partial: Whether the checkpoint may lack values for some objects.
      wanted: The names to restore, all belonging to one object that was added to the checkpoint
        later; by default everything.
    """
    finish_earlier(path.parent)
    match = on_all_workers(f"restore {path}", lambda: _Match(inventory, path, partial, wanted))
    if len(set(all_gather("comparing checkpoints", match.manifest.checksum))) > 1:
        raise CheckpointMismatch(
            f"The workers found different checkpoints at {path}. Give all of them the same one, in "
            "a directory that all see."
        )
    resumed = _Resumed(match.inventory)
    try:
        on_all_workers(f"restore {path}", lambda: resumed.set(match.positions))
        frame = _context.current()
        with all_or_nothing(frame) as inside, _context.entered(inside):
            return match.carry_out(), match.manifest
    except BaseException as error:
        resumed.undo(error)
        raise


def any_has_one(path: Path | None) -> bool:
    """Return whether the workers have a checkpoint; raise if only some of them do."""
    without = all_gather("looking at what to restore", path is None)
    if any(without) and not all(without):
        names = " and ".join(worker_name(i) for i, none in enumerate(without) if none)
        raise CheckpointMismatch(
            f"Some workers have a checkpoint to restore, and {names} got None. Give all workers "
            "the same path, in a directory that all see."
        )
    return not any(without)


@final
class _Resumed:
    """Iterators that were set to other positions and can be set back."""

    def __init__(self, inventory: Inventory) -> None:
        self._parts = inventory.positions
        self._before: dict[str, object] = {}

    def set(self, positions: Mapping[str, object]) -> None:
        """Set all of them, even after one has failed: all workers must make the same calls."""
        failures = []
        for key, state in positions.items():
            self._before[key] = self._parts[key].read()
            try:
                self._parts[key].write(state)
            except Exception as error:
                error.add_note(f"It was to resume from what the checkpoint has for {key!r}.")
                failures.append(error)
        if failures:
            raise failures[0]

    def undo(self, cause: BaseException) -> None:
        for key, state in self._before.items():
            try:
                self._parts[key].write(state)
            except Exception as error:
                # The others are still reset, and the original error is raised.
                cause.add_note(f"{key!r} could not be set back to where it was: {error!r}")


@final
class _Match:
    """The match between saved values and entries, made without changing anything."""

    def __init__(
        self, inventory: Inventory, path: Path, partial: bool, wanted: Collection[str] | None
    ) -> None:
        self._path = path
        manifest = files.read_manifest(path)
        self.manifest = manifest = manifest if wanted is None else manifest.narrowed_to(wanted)
        self.inventory = inventory = inventory.completed_for(manifest.arrays)
        self._restored: list[str] = []
        self._unused: list[str] = []
        self._problems: list[str] = []
        self._later = [
            key
            for key in manifest.arrays
            if key not in inventory.arrays and inventory.waits_for(key)
        ]
        self._match(manifest.arrays, inventory.arrays, self._array_problem)
        self._match(manifest.values, inventory.values, self._value_problem)
        self._match(manifest.positions, inventory.positions, self._position_problem)
        self._missing = [
            key
            for entries, saved in (
                (inventory.arrays, manifest.arrays),
                (inventory.values, manifest.values),
                (inventory.positions, manifest.positions),
            )
            for key in entries
            if key not in saved and not self._optional(key)
        ]
        if self._problems:
            shown = "; ".join(self._problems[:_SHOWN])
            raise CheckpointMismatch(
                f"{path} does not fit: {shown}. Restore it into the objects that it was saved "
                "from, or leave those out that have changed; nothing has been changed."
            )
        if not partial:
            self._report([]).assert_existing_objects_matched()
        self.positions = {
            key: self._position(key) for key in self._restored if key in manifest.positions
        }
        keys = [key for key in self._restored if key in manifest.arrays]
        here = {key: self._own_part(key) for key in keys} | dict.fromkeys(self._later)
        self._arrays = read_arrays(path, manifest, here)

    def _own_part(self, key: str) -> Part | None:
        """Return the part of an array that this worker holds, or None if it holds all of it."""
        parts = self.inventory.arrays[key].parts
        return None if parts is None else parts.of(this_worker() if parts.count > 1 else 0)

    def carry_out(self) -> RestoreReport:
        inventory, manifest = self.inventory, self.manifest
        before: list[tuple[Callable[[Any], None], Any]] = []
        try:
            for key in self._restored:
                if key in inventory.arrays:
                    entry = inventory.arrays[key]
                    if entry.put_back is not None:
                        before.append((entry.put_back, entry.read()))
                    entry.write(self._arrays[key])
                elif key in inventory.values:
                    inventory.values[key].write(_like(inventory.values[key].read(), manifest, key))
            inventory.commit()
            later = {key: self._arrays[key] for key in self._later}
            return self._report(inventory.defer(later, manifest.arrays))
        except BaseException:
            for put_back, value in reversed(before):
                put_back(value)
            raise

    def _report(self, deferred: list[Deferred]) -> RestoreReport:
        return RestoreReport(str(self._path), self._restored, self._unused, self._missing, deferred)

    def _match(
        self,
        saved: Mapping[str, object],
        entries: Mapping[str, object],
        problem: Callable[[str], str | None],
    ) -> None:
        for key in saved:
            if key in entries:
                found = problem(key)
                if found is None:
                    self._restored.append(key)
                else:
                    self._problems.append(f"{key!r} {found}")
            elif key not in self._later and not self._optional(key):
                self._unused.append(key)

    def _optional(self, key: str) -> bool:
        known = self.inventory.arrays.get(key) or self.manifest.arrays.get(key)
        return known is not None and known.optional

    def _array_problem(self, key: str) -> str | None:
        entry, facts = self.inventory.arrays[key], self.manifest.arrays[key]
        now = described(entry.shape, entry.dtype)
        then = f"{facts.dtype}{list(facts.shape)}"
        return None if now == then else f"is {now} now and {then} in the checkpoint"

    def _value_problem(self, key: str) -> str | None:
        now, then = self.inventory.values[key].read(), self.manifest.values[key]
        return None if _is_like(now, then) else f"is {now!r} now and {then!r} in the checkpoint"

    def _position_problem(self, key: str) -> str | None:
        entry, position = self.inventory.positions[key], self.manifest.positions[key]
        workers = worker_count()
        if entry.shared and position.shared:
            return None
        if workers == self.manifest.workers == 1:
            return None
        if entry.shared != position.shared:
            return (
                f"was saved by {self.manifest.workers} worker(s) that read "
                f"{_what_is_read(position.shared)}, and is for {workers} that read "
                f"{_what_is_read(entry.shared)}"
            )
        if workers == self.manifest.workers:
            return None
        return (
            f"was saved by {self.manifest.workers} worker(s), each of which may have read data of "
            f"its own, and cannot be shared out among {workers}"
        )

    def _position(self, key: str) -> object:
        position = self.manifest.positions[key]
        return position.states[0 if position.shared else this_worker()]


def _what_is_read(shared: bool) -> str:
    return "the same data" if shared else "data of their own"


def _is_like(now: object, then: object) -> bool:
    # None stands for a value that will be known later.
    return (
        now is None
        or then is None
        or type(now) is type(then)
        or (type(now) is float and type(then) is int)
    )


def _like(now: Plain, manifest: Manifest, key: str) -> Plain:
    then = manifest.values[key]
    return then if now is None or then is None else type(now)(then)
