"""Checkpoints of state that is divided over the workers: each writes and reads its own part.

The first worker makes the directory in which a checkpoint is written. Every worker writes its parts
of arrays there, as a checkpoint of their own: `parts-0`, `parts-1` and so on. When the first worker
sees all of them, it moves them into the checkpoint and gives that its name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import final

import jax
import jax.numpy as jnp
import numpy as np

from replicax.checkpoint import _files as files
from replicax.checkpoint._failures import reason
from replicax.checkpoint._manifest import ArrayFacts, Manifest
from replicax.checkpoint._workers import (
    SAVING,
    all_gather,
    has_ended,
    on_all_workers,
    this_worker,
    worker_name,
)
from replicax.errors import InvalidCheckpoint, SaveFailed
from replicax.variables import Part, Ranges, WorkerParts

Arrays = Mapping[str, np.ndarray]

_WORKER = "worker"  # in the manifest of a part: whose it is
_FAILED = "failed"  # the suffix of the file in which a worker says why it could not write its part
_VISIBLE_SECONDS = 20.0  # the time for other machines to see a new directory
_BATCH_BYTES = 256 * 2**20  # read at once, although only a part of them is kept


def _name(worker: int) -> str:
    return f"parts-{worker}"


@final
class SharedWorkplace:
    """The directory in which the workers write a checkpoint together.

    All workers must make it. While it is open, the directories that this worker writes into are
    locked, so that the others can tell whether this worker is still alive.

    Args:
      path: The path of the checkpoint.
      prepare: Prepares the directory of checkpoints, on the first worker.
    """

    def __init__(self, path: Path, prepare: Callable[[], None]) -> None:
        self._path, self._own = path, this_worker()
        self._locks = ExitStack()

        def make() -> str | None:
            if self._own:
                return None
            prepare()
            return self._locks.enter_context(files.workplace(path)).name

        try:
            name = on_all_workers("make a directory for a checkpoint", make, SAVING)
            self._place = path.parent / all_gather("the directory of a checkpoint", name)[0]
            part = self._place / _name(self._own)
            self._own_place = on_all_workers(
                "join in writing a checkpoint",
                lambda: self._locks.enter_context(_workplace_when_seen(part)),
                SAVING,
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove what was not published."""
        self._locks.close()

    def write(self, parts: Arrays, arrays: Arrays, manifest: Manifest, replaces: bool) -> None:
        """Write this worker's parts; on the first worker, also write the rest, and publish it all.

        Args:
          parts: The parts, by the name of their array.
          arrays: The arrays that are not divided.
          manifest: Everything else, for the whole checkpoint.
          replaces: Whether to replace an existing checkpoint.
        """
        facts = {
            key: manifest.arrays[key].of_part(_parts_of(manifest, key).of(self._own))
            for key in parts
        }
        manifest = replace(manifest, save_id=self._place.name)
        whose = {_WORKER: self._own}
        own = Manifest(manifest.saves, manifest.workers, facts, whose, {}, 0, manifest.save_id)
        try:
            written = files.write_into(self._own_place, parts, own)
            # The first worker flushes the directory, and may have removed it by then.
            files.publish(written, self._place / _name(self._own), replaces=False, flushes=False)
        except BaseException as error:
            with suppress(OSError):
                said = self._own_place / _FAILED
                said.write_text(reason(error))
                said.rename(self._place / f"{_name(self._own)}.{_FAILED}")
            raise
        if not self._own:
            written = files.write_into(self._place, arrays, manifest)
            for worker in range(manifest.workers):
                self._await(worker)
                (self._place / _name(worker)).rename(written / _name(worker))
            files.publish(written, self._path, replaces)

    def _await(self, worker: int) -> None:
        """Wait until a worker has written its part; raise if it has ended without doing so."""
        part = self._place / _name(worker)
        failure = part.with_name(f"{part.name}.{_FAILED}")
        while not files.is_there(part):
            # Not by its lock, which another machine need not see. The order matters: a worker
            # that has ended may have written its part before.
            failed, ended = files.is_there(failure), has_ended(worker)
            if (failed or ended) and not files.is_there(part):
                why = failure.read_text() if failed else "it has ended before that"
                raise SaveFailed(f"{worker_name(worker)} has not written its part: {why}")
            time.sleep(0.02)


def _workplace_when_seen(part: Path) -> AbstractContextManager[Path]:
    """Return a workplace for `part`, in a directory that another machine may just have made."""
    latest = time.monotonic() + _VISIBLE_SECONDS
    while not files.is_there(part.parent):
        if time.monotonic() > latest:
            raise SaveFailed(
                f"the directory {part.parent}, which the first worker has made, is not seen here"
            )
        time.sleep(0.05)
    return files.workplace(part)


def read_arrays(
    path: Path, manifest: Manifest, wanted: Mapping[str, Part | None]
) -> dict[str, jax.Array | np.ndarray]:
    """Return arrays of a checkpoint, as the program had them.

    Args:
      path: The checkpoint.
      manifest: Its manifest.
      wanted: The part to return of each array, by name; None for the whole array.
    """
    divided = {key for key in wanted if manifest.arrays[key].parts is not None}
    whole = [key for key, part in wanted.items() if key not in divided and part is None]
    values = files.read_arrays(path, manifest, whole)
    cut = {key: part for key, part in wanted.items() if key not in divided and part is not None}
    for batch in _batches({key: manifest.arrays[key] for key in cut}):
        for key, value in files.read_arrays(path, manifest, batch).items():
            values[key] = np.array(value[_slices(cut[key].ranges(value.shape))])
    return values | _assembled(path, manifest, {key: wanted[key] for key in divided})


def _assembled(
    path: Path, manifest: Manifest, wanted: Mapping[str, Part | None]
) -> dict[str, np.ndarray]:
    """Return arrays, or parts of them, put together from the parts that workers have written."""
    if not wanted:
        return {}
    ranges = {
        key: [(0, size) for size in manifest.arrays[key].shape]
        if part is None
        else part.ranges(manifest.arrays[key].shape)
        for key, part in wanted.items()
    }
    values = {
        key: np.zeros([stop - start for start, stop in each], jnp.dtype(manifest.arrays[key].dtype))
        for key, each in ranges.items()
    }
    for worker in range(manifest.workers):
        overlaps = {}
        for key, own in ranges.items():
            theirs = _parts_of(manifest, key).of(worker).ranges(manifest.arrays[key].shape)
            both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(own, theirs, strict=True)]
            if all(start < stop for start, stop in both):
                overlaps[key] = (both, [c for c, _ in theirs])
        if not overlaps:
            continue
        directory = path / _name(worker)
        if not files.is_checkpoint(directory):
            raise InvalidCheckpoint(files.unusable(path, f"{directory.name} in it is missing"))
        parts = files.read_manifest(directory)
        if (parts.save_id, parts.values.get(_WORKER)) != (manifest.save_id, worker):
            problem = f"{directory.name} in it is of another save, or of another worker"
            raise InvalidCheckpoint(files.unusable(path, problem))
        for key in overlaps:
            expected = manifest.arrays[key].of_part(_parts_of(manifest, key).of(worker))
            _require_part(path, directory.name, key, expected, parts.arrays.get(key))
        for batch in _batches({key: parts.arrays[key] for key in overlaps}):
            for key, block in files.read_arrays(directory, parts, batch).items():
                both, begin = overlaps[key]
                source = _slices(both, begin)
                values[key][_slices(both, [a for a, _ in ranges[key]])] = block[source]
    return values


def _parts_of(manifest: Manifest, key: str) -> WorkerParts:
    parts = manifest.arrays[key].parts
    assert parts is not None
    return parts


def _require_part(
    path: Path, name: str, key: str, expected: ArrayFacts, found: ArrayFacts | None
) -> None:
    if found is None or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        then = "nothing" if found is None else f"{found.dtype}{list(found.shape)}"
        raise InvalidCheckpoint(
            files.unusable(
                path,
                f"{name} in it has {then} of the array {key!r}, and "
                f"{expected.dtype}{list(expected.shape)} by the manifest",
            )
        )


def _slices(ranges: Ranges, begin: Sequence[int] | None = None) -> tuple[slice, ...]:
    """Return ranges as an index into an array that begins at the indices `begin`."""
    offsets = [0] * len(ranges) if begin is None else begin
    return tuple(slice(a - n, b - n) for (a, b), n in zip(ranges, offsets, strict=True))


def _batches(facts: Mapping[str, ArrayFacts]) -> Iterator[list[str]]:
    """Group arrays so that each group takes little memory."""
    batch: list[str] = []
    size = 0
    for key, each in facts.items():
        nbytes = math.prod(each.shape) * jnp.dtype(each.dtype).itemsize
        if batch and size + nbytes > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(key)
        size += nbytes
    if batch:
        yield batch
