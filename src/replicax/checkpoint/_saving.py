"""Saving by all workers together: one writes what they share, and each its own parts."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, final

import jax
import numpy as np
from jax.experimental import multihost_utils

from replicax import cluster
from replicax.checkpoint import _files as files
from replicax.checkpoint._entries import ArrayEntry
from replicax.checkpoint._failures import reason
from replicax.checkpoint._inventory import Inventory
from replicax.checkpoint._manifest import ArrayFacts, Manifest, Position, is_key
from replicax.checkpoint._parts import SharedWorkplace
from replicax.checkpoint._workers import (
    SAVING,
    all_gather,
    this_worker,
    worker_count,
    worker_name,
)
from replicax.checkpoint._writer_thread import BUSY, DONE, Writer, under_way
from replicax.errors import (
    CheckpointError,
    CollectiveMismatch,
    InvalidArgument,
    InvalidType,
    SaveFailed,
)

if TYPE_CHECKING:
    from replicax._typing import Json

# Workers exchange the states of their iterators over the control connection.
_LONGEST_STATES = 8_000_000  # characters of JSON, for all workers together
_LONGEST_SILENCE = 60.0  # seconds between two reports of a worker that writes


@final
@dataclass(frozen=True, slots=True)
class Numbered:
    """The place for a checkpoint of this worker: `directory/name-number`, or the next number."""

    directory: Path
    name: str
    number: int | None = None
    doing: ClassVar[str] = SAVING
    replaces: ClassVar[bool] = False

    @property
    def place(self) -> list[str]:
        """The real directory and the name: equal for workers that mean the same place."""
        return [os.path.realpath(self.directory), self.name]

    def path(self, number: int) -> Path:
        return self.directory / f"{self.name}-{number}"

    def proposed(self, saves: int) -> int:
        """Return the number that this worker proposes, after this many saves."""
        return max(saves, *self.taken(), 0) + 1 if self.number is None else self.number

    def taken(self) -> list[int]:
        """Return the numbers that exist, and those that this process is about to write."""
        begun = [each.path.name.rpartition("-") for each in under_way(self.directory)]
        return [
            *files.taken(self.directory, self.name),
            *(int(number) for name, _, number in begun if name == self.name and number.isdigit()),
        ]

    def remove_leftovers(self) -> None:
        files.remove_leftovers(self.directory, rf"{re.escape(self.name)}-\d+")


@final
@dataclass(frozen=True, slots=True)
class Exact:
    """The place for a checkpoint without a number, which replaces an existing one."""

    directory: Path
    name: str
    doing: ClassVar[str] = "writing a checkpoint"
    replaces: ClassVar[bool] = True

    @property
    def place(self) -> list[str]:
        return [os.path.realpath(self.directory), self.name]

    def path(self, number: int) -> Path:
        return self.directory / self.name

    def proposed(self, saves: int) -> int:
        """Return 0; raise if the path is taken by something that must not be replaced."""
        path = self.path(0)
        if files.is_there(path) and not files.is_checkpoint(path):
            raise InvalidArgument(
                f"A checkpoint cannot be written to {path}: there is something else, that is no "
                "checkpoint of replicax. Remove it, or give another path."
            )
        return 0

    def remove_leftovers(self) -> None:
        files.complete_replacement(self.path(0))
        files.remove_leftovers(self.directory, re.escape(self.name))


Target = Numbered | Exact


@final
class Saving:
    """A save that has begun: the values are taken, and one worker writes them.

    Args:
      path: The path of the checkpoint for this worker.
      writer: The thread that writes it, if this worker does.
    """

    def __init__(self, path: Path, writer: Writer | None) -> None:
        self.path = path
        self.finished = self.failed = False
        self._writer = writer

    @property
    def has_failed(self) -> bool:
        """True if this process, the only worker, already knows that writing has failed."""
        # Several workers must all raise the error in the same call.
        return worker_count() == 1 and self._writer is not None and self._writer.has_failed

    def finish(self) -> None:
        """Wait until some worker has written it; raise `SaveFailed`, once, if that failed."""
        if self.finished:
            return
        limit = _longest_wait()
        while True:
            news = all_gather("the end of a save", self._writer and self._writer.news(limit))
            if not any(each == BUSY for each in news):
                break
        # This comes last: after an interrupt the next call waits again.
        self.finished = True
        for worker, each in enumerate(news):
            if each is not None and each != DONE:
                self.failed = True
                cause = self._writer.surface() if self._writer is not None else None
                error = SaveFailed(
                    f"{worker_name(worker)} could not write the checkpoint {each['path']}: "
                    f"{each['error']}. Earlier checkpoints are as they were; save again when the "
                    "cause is removed."
                )
                error.follows_another = worker != this_worker()
                raise error from cause


def finish_earlier(directory: Path) -> None:
    """Wait for all saves into a directory, by any worker and any manager.

    A manager that an error has ended does not wait for its last checkpoint, so the next manager
    that looks for the latest one must.
    """
    limit = _longest_wait()
    while True:
        busy = any(each.news(limit) == BUSY for each in under_way(directory))
        if not any(all_gather("the end of earlier saves", busy)):
            return


def _longest_wait() -> float | None:
    """Return how long a worker may wait alone before it must report to the others."""
    session = cluster.session()
    # The writing worker reports too, saying that it is not done, so that the others do not take it
    # for stuck.
    return None if session is None else min(session.timeout_seconds / 4, _LONGEST_SILENCE)


def begin(
    inventory: Inventory,
    target: Target,
    saves: int,
    run_calls: int,
    afterwards: Callable[[], None] = lambda: None,
) -> Saving:
    """Take all values, agree with the other workers, and begin to write.

    Args:
      inventory: The objects to save.
      target: The place. Workers with the same path share one checkpoint, which the first of them
        writes; a worker with a path of its own writes its own checkpoint.
      saves: The number of saves, including this one.
      run_calls: The number of calls that a `PreemptionCheckpointHandler` has made.
      afterwards: Called when the checkpoint is complete, in the thread that wrote it.
    """
    entries = inventory.arrays
    values = {key: entry.read() for key, entry in entries.items()} | inventory.deferred
    for value in values.values():
        if isinstance(value, jax.Array):
            value.copy_to_host_async()
    arrays = {
        key: _on_host(value, key in inventory.deferred or entries[key].lasting)
        for key, value in values.items()
    }
    facts = {
        key: entries[key].facts(value) if key in entries else ArrayFacts.of(value)
        for key, value in values.items()
    }
    plain = {key: entry.read() for key, entry in inventory.values.items()}
    everyones = _agree(inventory, target, saves, facts)
    number = max(each["number"] for each in everyones)
    places = [each["place"] for each in everyones]
    divided = [key for key, each in facts.items() if each.parts is not None]
    if any(place != places[0] for place in places):
        # Workers may be unable to read what others have written, so each writes all of it.
        for key in divided:
            arrays[key] = _on_host(_whole_of(entries[key]), lasting=False)
            facts[key] = replace(facts[key], parts=None)
        divided = []
    manifest = Manifest(
        max(each["saves"] for each in everyones),
        len(everyones),
        facts,
        plain,
        {
            key: Position(entry.shared, [e["positions"][key] for e in everyones][: _count(entry)])
            for key, entry in inventory.positions.items()
        },
        run_calls,
    )
    path, own = target.path(number), this_worker()
    is_first = places.index(places[own]) == own

    def prepare() -> None:
        target.directory.mkdir(parents=True, exist_ok=True)
        target.remove_leftovers()

    if divided:
        parts = {key: arrays.pop(key) for key in divided}
        try:
            workplace = SharedWorkplace(path, prepare)
        except (OSError, CheckpointError) as error:
            raise SaveFailed(f"No checkpoint can be saved: {reason(error)}.") from error

        def write_together() -> None:
            with closing(workplace):
                workplace.write(parts, arrays, manifest, target.replaces)
            if is_first:
                afterwards()

        return Saving(path, Writer(path, write_together))

    def write() -> None:
        prepare()
        files.write(path, arrays, manifest, target.replaces)
        afterwards()

    return Saving(path, Writer(path, write) if is_first else None)


def _whole_of(entry: ArrayEntry) -> jax.Array:
    assert entry.variable is not None  # only variables are divided
    return entry.variable.value


def _count(entry: Any) -> int | None:
    """Return how many of the workers' states are kept; None for all."""
    return 1 if entry.shared else None


def _agree(
    inventory: Inventory, target: Target, saves: int, facts: Mapping[str, ArrayFacts]
) -> list[dict[str, Json]]:
    """Agree on the contents of the checkpoint; return every worker's proposal and positions."""
    contents = sorted(
        [f"{key}: {each.dtype}{list(each.shape)}" for key, each in facts.items()]
        + [f"{key}: a value" for key in inventory.values]
        + [f"{key}: a position" for key in inventory.positions]
    )
    failure = None
    positions: dict[str, Json] = {}
    number = 0
    try:
        number = target.proposed(saves - 1)
        positions = {
            key: None if entry.shared and this_worker() else _expressed(key, entry.read())
            for key, entry in inventory.positions.items()
        }
    except CheckpointError as error:
        failure = SaveFailed(f"No checkpoint can be saved: {error}")
    except Exception as error:
        failure = error
    everyones = all_gather(
        target.doing,
        {
            "place": target.place,
            "number": number,
            "saves": saves,
            "contents": zlib.crc32("\n".join(contents).encode()),
            "positions": positions,
            "failure": None if failure is None else f"{type(failure).__name__}: {failure}",
        },
    )
    if failure is not None:
        raise failure
    for worker, each in enumerate(everyones):
        if each["failure"] is not None:
            raise SaveFailed(
                f"{worker_name(worker)} cannot save its part of the checkpoint, so that no worker "
                f"has: {each['failure']}"
            )
    if len({each["contents"] for each in everyones}) > 1:
        _refuse_difference(all_gather("comparing what is saved", contents))
    return everyones


def _refuse_difference(contents: list[list[str]]) -> None:
    common = set(contents[0]).intersection(*contents)
    seen = "; ".join(
        f"{worker_name(worker)} has {', '.join(own) or 'nothing else'}"
        for worker, each in enumerate(contents)
        for own in [[line for line in each if line not in common][:3]]
    )
    raise CollectiveMismatch(
        f"The workers are about to save different things in a checkpoint: {seen}. Give the "
        "checkpoint the same objects on every worker."
    )


def _expressed(key: str, state: object) -> Json:
    try:
        text = json.dumps(state)
        _require_words_as_keys(state)
    except (TypeError, ValueError) as error:
        raise InvalidType(
            f"The state of {key!r} cannot be saved, because JSON cannot express it: {error}. "
            "Give the checkpoint something whose `get_state` returns dicts, lists, numbers and "
            "words."
        ) from error
    limit = _LONGEST_STATES // worker_count()
    if len(text) > limit:
        raise InvalidArgument(
            f"The state of {key!r} is too large for a checkpoint: it takes {len(text)} characters "
            f"of JSON, and at most {limit} are possible. Save it separately."
        )
    return json.loads(text)


def _require_words_as_keys(state: object) -> None:
    """Refuse keys that are not strings: JSON would silently convert them."""
    if isinstance(state, dict):
        for key, value in state.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} would become the word {str(key)!r}")
            _require_words_as_keys(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            _require_words_as_keys(value)


def _on_host(value: jax.Array | np.ndarray, lasting: bool) -> np.ndarray:
    if is_key(value):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = _whole(value)
    numbers = np.asarray(value) if lasting else np.array(value)
    # The format supports only the native byte order.
    return numbers.astype(numbers.dtype.newbyteorder("="), copy=False)


def _whole(array: jax.Array) -> jax.Array | np.ndarray:
    """Return the whole of an array that is spread over devices of several processes."""
    if array.is_fully_replicated:
        return array.addressable_data(0)
    session = cluster.current()
    session.catch_up()
    return session.run(
        "gathering an array for a checkpoint",
        lambda: multihost_utils.process_allgather(array, tiled=True),
    )
