"""Saving, by all workers together: all bring what they have, one of them writes."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import jax
import numpy as np
from jax.experimental import multihost_utils

from replicax import cluster
from replicax.checkpoint import _files as files
from replicax.checkpoint._inventory import Inventory
from replicax.checkpoint._manifest import ArrayFacts, Manifest, Position, is_key
from replicax.checkpoint._writing import BUSY, DONE, Writing, under_way
from replicax.errors import (
    CheckpointError,
    CollectiveMismatch,
    InvalidArgument,
    InvalidType,
    SaveFailed,
)

# What workers tell each other of their iterators goes through the connection for control.
_LONGEST_STATES = 8_000_000  # characters of JSON, of all workers
_LONGEST_SILENCE = 60.0  # seconds that a worker which writes waits between two meetings


def meet(label: str, value: Any = None) -> list[Any]:
    """Return what all workers bring; of a process alone, what it brings itself."""
    session = cluster.session()
    return [value] if session is None else session.meet(label, value)


def this_worker() -> int:
    session = cluster.session()
    return 0 if session is None else session.members.index


def worker_count() -> int:
    session = cluster.session()
    return 1 if session is None else session.members.count


def worker_name(worker: int) -> str:
    session = cluster.session()
    return "this process" if session is None else session.members.names[worker]


@final
@dataclass(frozen=True, slots=True)
class Numbered:
    """Where this worker wants a checkpoint: `directory/name-number`, or the next number."""

    directory: Path
    name: str
    number: int | None = None
    doing: ClassVar[str] = "saving a checkpoint"
    replaces: ClassVar[bool] = False

    @property
    def place(self) -> list[str]:
        """The same for all who mean the same, by whatever links they come to it."""
        return [os.path.realpath(self.directory), self.name]

    def path(self, number: int) -> Path:
        return self.directory / f"{self.name}-{number}"

    def proposed(self, saves: int) -> int:
        """Return the number that this worker would give it, after so many saves."""
        return max(saves, *self.taken(), 0) + 1 if self.number is None else self.number

    def taken(self) -> list[int]:
        """Return the numbers of what is there, and of what this process is about to write there."""
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
    """Where this worker wants a checkpoint without a number; it replaces the one that is there."""

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
        """Return 0, unless the path is taken by something that must not be replaced."""
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
      path: Where this worker has it.
      writing: If this worker writes.
    """

    def __init__(self, path: Path, writing: Writing | None) -> None:
        self.path = path
        self.finished = self.failed = False
        self._writing = writing

    @property
    def has_failed(self) -> bool:
        """Whether a process alone knows by now that it could not be written."""
        # Of several workers all have to raise it at the same call.
        return worker_count() == 1 and self._writing is not None and self._writing.has_failed

    def finish(self) -> None:
        """Wait until it is written, wherever that is; raise `SaveFailed`, once, if it was not."""
        if self.finished:
            return
        limit = _longest_wait()
        while True:
            news = meet("the end of a save", self._writing and self._writing.news(limit))
            if not any(each == BUSY for each in news):
                break
        # Not before: after an interrupt the next call waits again.
        self.finished = True
        for worker, each in enumerate(news):
            if each is not None and each != DONE:
                self.failed = True
                cause = self._writing.surface() if self._writing is not None else None
                error = SaveFailed(
                    f"{worker_name(worker)} could not write the checkpoint {each['path']}: "
                    f"{each['error']}. Earlier checkpoints are as they were; save again when the "
                    "reason is gone."
                )
                error.follows_another = worker != this_worker()
                raise error from cause


def finish_earlier(directory: Path) -> None:
    """Wait for what the workers' processes still write into a directory, by any manager.

    A manager that was left by an error does not wait for its last checkpoint. The next one that
    looks for the latest has to.
    """
    limit = _longest_wait()
    while True:
        busy = any(each.news(limit) == BUSY for each in under_way(directory))
        if not any(meet("the end of earlier saves", busy)):
            return


def _longest_wait() -> float | None:
    """Return how long a worker may wait by itself before it must meet the others."""
    session = cluster.session()
    # Who writes comes to the meetings too, and says that it is not ready, so that the others
    # do not take it for stuck.
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
      inventory: What is saved.
      target: Where. Workers that name the same path share one checkpoint, which the first of them
        writes; one that names a path of its own writes one of its own.
      saves: How many times it has been saved, with this one.
      run_calls: How many calls a `PreemptionCheckpointHandler` has made.
      afterwards: Is called when the checkpoint is complete, in the thread that wrote it.
    """
    parts = inventory.arrays
    values = {key: part.read() for key, part in parts.items()} | inventory.deferred
    for value in values.values():
        if isinstance(value, jax.Array):
            value.copy_to_host_async()
    arrays = {
        key: _on_host(value, key in inventory.deferred or parts[key].lasting)
        for key, value in values.items()
    }
    facts = {
        key: ArrayFacts.of(value, key in parts and parts[key].optional)
        for key, value in values.items()
    }
    plain = {key: part.read() for key, part in inventory.values.items()}
    everyones = _agree(inventory, target, saves, facts)
    number = max(each["number"] for each in everyones)
    places = [each["place"] for each in everyones]
    manifest = Manifest(
        max(each["saves"] for each in everyones),
        len(everyones),
        facts,
        plain,
        {
            key: Position(part.shared, [e["positions"][key] for e in everyones][: _count(part)])
            for key, part in inventory.positions.items()
        },
        run_calls,
    )
    path, own = target.path(number), this_worker()

    def write() -> None:
        target.directory.mkdir(parents=True, exist_ok=True)
        target.remove_leftovers()
        files.write(path, arrays, manifest, target.replaces)
        afterwards()

    writes = places.index(places[own]) == own
    return Saving(path, Writing(path, write) if writes else None)


def _count(part: Any) -> int | None:
    """Return how many of the workers' states are kept."""
    return 1 if part.shared else None


def _agree(
    inventory: Inventory, target: Target, saves: int, facts: Mapping[str, ArrayFacts]
) -> list[dict[str, Any]]:
    """Agree on what is saved, and return what each worker brings and where it writes."""
    contents = sorted(
        [f"{key}: {each.dtype}{list(each.shape)}" for key, each in facts.items()]
        + [f"{key}: a value" for key in inventory.values]
        + [f"{key}: a position" for key in inventory.positions]
    )
    failure = None
    positions: dict[str, Any] = {}
    number = 0
    try:
        number = target.proposed(saves - 1)
        positions = {
            key: None if part.shared and this_worker() else _expressed(key, part.read())
            for key, part in inventory.positions.items()
        }
    except CheckpointError as error:
        failure = SaveFailed(f"No checkpoint can be saved: {error}")
    except Exception as error:
        failure = error
    everyones = meet(
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
        _refuse_difference(meet("comparing what is saved", contents))
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


def _expressed(key: str, state: Any) -> Any:
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


def _require_words_as_keys(state: Any) -> None:
    """Refuse other keys, of which JSON would make words without saying so."""
    if isinstance(state, dict):
        for key, value in state.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} would become the word {str(key)!r}")
            _require_words_as_keys(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            _require_words_as_keys(value)


def _on_host(value: Any, lasting: bool) -> np.ndarray:
    if is_key(value):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = _whole(value)
    numbers = np.asarray(value) if lasting else np.array(value)
    # The format has no other order of bytes.
    return numbers.astype(numbers.dtype.newbyteorder("="), copy=False)


def _whole(array: jax.Array) -> Any:
    """Return all of an array that is on devices of several processes."""
    if array.is_fully_replicated:
        return array.addressable_data(0)
    return cluster.current().run(
        "gathering an array for a checkpoint",
        lambda: multihost_utils.process_allgather(array, tiled=True),
    )
