"""Keras callbacks that write files, with several workers: one writes, the others wait."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import keras

from replicax import cluster
from replicax.errors import InvalidArgument, SaveFailed
from replicax.integrations.keras._hooks import strategy_of
from replicax.integrations.keras._patches import Patches
from replicax.integrations.keras._private import first_epoch, replace_saves

Checkpoint, Backup = keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore


def install(patches: Patches) -> None:
    """Wrap the methods that write files, and those that read or remove them."""
    for callback in (Checkpoint, Backup):
        replace_saves(patches, callback, _by_one)
    patches.replace(Backup, "on_train_begin", _agreeing)
    patches.replace(Backup, "on_train_end", _removing)


def _by_one(save: Callable[..., object], callback: object, *args: object, **kwargs: object) -> Any:
    """Save on the first of the workers that share a path; all continue once it is written."""
    session = _session_of(callback)
    if session is None:
        return save(callback, *args, **kwargs)
    writer = _writer(session, callback)
    error = None
    if writer == session.members.index:
        try:
            save(callback, *args, **kwargs)
        except Exception as caught:
            error = caught
    best = callback.best if isinstance(callback, Checkpoint) else None
    outcomes = session.all_gather(
        f"the end of a save by {type(callback).__name__}",
        [None if error is None else f"{type(error).__name__}: {error}", best],
    )
    if error is not None:
        raise error
    failures = {
        name: failure
        for name, (failure, _) in zip(session.members.names, outcomes, strict=True)
        if failure is not None
    }
    if failures:
        raised = SaveFailed(
            f"{type(callback).__name__} could not save to {_path(callback)!r}. "
            + "; ".join(f"{name}: {failure}" for name, failure in failures.items())
            + ". Give a path at which the first worker may write."
        )
        raised.follows_another = True
        raise raised
    if isinstance(callback, Checkpoint):
        callback.best = outcomes[writer][1]  # only the writer has compared
    return None


def _agreeing(begin: Callable[..., Any]) -> Callable[..., object]:
    """Require that all workers restore the same backup, or none."""

    @functools.wraps(begin)
    def agreed(self: Any, logs: Any = None) -> None:
        begin(self, logs)
        session = _session_of(self)
        if session is None:
            return
        epochs = session.all_gather(
            f"the beginning of {type(self).__name__}", first_epoch(self.model)
        )
        if len(set(epochs)) > 1:
            seen = ", ".join(
                f"{name} begins with epoch {epoch or 0}"
                for name, epoch in zip(session.members.names, epochs, strict=True)
            )
            raise InvalidArgument(
                f"The workers have different backups in {_path(self)!r}: {seen}. Give a directory "
                "that all workers see, or remove what is left in it."
            )

    return agreed


def _removing(end: Callable[..., object]) -> Callable[..., object]:
    """Remove a backup on the worker that wrote it, before any worker begins another `fit`."""

    @functools.wraps(end)
    def removed(self: object, logs: object = None) -> None:
        session = _session_of(self)
        if session is None or _writer(session, self) == session.members.index:
            end(self, logs)
        if session is not None:
            session.all_gather(f"the end of {type(self).__name__}")

    return removed


def _session_of(callback: Any) -> cluster.Session | None:
    """Return the session of the workers that fit a callback's model, if there are several."""
    strategy = strategy_of(callback.model)
    return cluster.current() if strategy and strategy.topology.spans_processes else None


def _writer(session: cluster.Session, callback: object) -> int:
    """Return the index of the worker that writes for this one: the first with the same path."""
    path = _path(callback)
    return session.all_gather(f"a save by {type(callback).__name__}", path).index(path)


def _path(callback: Any) -> str:
    path = callback.filepath if isinstance(callback, Checkpoint) else callback.backup_dir
    return os.fspath(path)
