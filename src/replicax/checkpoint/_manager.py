"""The checkpoints of a run: those that are kept, the latest one, and when the next is due."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, Self, SupportsInt, final

from replicax.checkpoint import _files as files
from replicax.checkpoint._checkpoint import (
    Checkpoint,
    PathLike,
    local_path,
    require_usable,
)
from replicax.checkpoint._report import RestoreReport
from replicax.checkpoint._retention import Retention
from replicax.checkpoint._saving import Numbered, Saving, finish_earlier
from replicax.checkpoint._workers import all_gather, on_all_workers
from replicax.errors import InvalidArgument, InvalidCheckpoint, InvalidType


@final
class CheckpointManager:
    """A manager that saves a checkpoint repeatedly in a directory and keeps the latest ones.

    Args:
      checkpoint: The checkpoint to save.
      directory: The directory for it. All workers of a run must see it, and pass the same one.
      max_to_keep: The number of checkpoints to keep; None for all.
      keep_checkpoint_every_n_hours: Of the surplus checkpoints, one is kept for good if this many
        hours have passed since the last such one, or since the first manager was made.
      checkpoint_name: The beginning of the checkpoints' names.
      step_counter: A variable that counts steps, for `checkpoint_interval`.
      checkpoint_interval: The number of steps after which the next checkpoint is due; `save` does
        nothing until then.
      init_fn: The function that `restore_or_initialize` calls if there is no checkpoint.
      asynchronous: Whether `save` returns as soon as the values are taken, and a thread writes them
        while the program continues. Its errors are raised by a later call. At the end of the
        program, `close` the manager, or use it in a `with` statement.

    >>> import tempfile, replicax as rx
    >>> directory = tempfile.TemporaryDirectory()
    >>> step = rx.Variable(0)
    >>> manager = rx.CheckpointManager(rx.Checkpoint(step=step), directory.name, max_to_keep=2)
    >>> for _ in range(4):
    ...     _ = step.assign_add(1)
    ...     path = manager.save()
    >>> [path.rpartition("/")[2] for path in manager.checkpoints]
    ['ckpt-3', 'ckpt-4']
    >>> _ = step.assign(0)
    >>> manager.restore_or_initialize() == manager.latest_checkpoint == path, int(step)
    (True, 4)
    >>> directory.cleanup()
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: PathLike,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], object] | None = None,
        *,
        asynchronous: bool = False,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidType(f"A manager is for an `rx.Checkpoint`; got {checkpoint!r}.")
        for name, count in (
            ("max_to_keep", max_to_keep),
            ("checkpoint_interval", checkpoint_interval),
        ):
            whole = isinstance(count, int) and not isinstance(count, bool)
            if count is not None and (not whole or count < 1):
                raise InvalidArgument(f"`{name}` must be a positive whole number; got {count!r}.")
        if checkpoint_interval is not None and step_counter is None:
            raise InvalidArgument(
                "`checkpoint_interval` needs a `step_counter`, such as `optimizer.iterations`."
            )
        if step_counter is not None and not isinstance(step_counter, SupportsInt):
            raise InvalidType(
                f"`step_counter` is a variable that counts steps; got {step_counter!r}."
            )
        if not isinstance(checkpoint_name, str) or not re.fullmatch(r"[^/\\\0]+", checkpoint_name):
            raise InvalidArgument(
                f"`checkpoint_name` is a name, and no path; got {checkpoint_name!r}. Give the path "
                "as the directory."
            )
        require_usable(checkpoint_name)
        if init_fn is not None and not callable(init_fn):
            raise InvalidType(f"`init_fn` must be a function; got {init_fn!r}.")
        self._checkpoint = checkpoint
        self._directory = local_path(directory)
        self._retention = Retention(
            self._directory, checkpoint_name, max_to_keep, keep_checkpoint_every_n_hours
        )
        self._name = checkpoint_name
        self._step_counter = step_counter
        self._interval = checkpoint_interval
        self._init_fn = init_fn
        self._asynchronous = asynchronous
        self._saving: Saving | None = None
        self._last_step: int | None = None
        self._report: RestoreReport | None = None

    @property
    def directory(self) -> str:
        """The directory of the checkpoints."""
        return str(self._directory)

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that is saved."""
        return self._checkpoint

    @property
    def checkpoint_interval(self) -> int | None:
        """The number of steps after which the next checkpoint is due."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """The paths of all complete checkpoints, the latest last, except those kept for good.

        Reading it waits for a checkpoint that is being written, as `sync` does.
        """
        self.sync()
        return self._complete()

    @property
    def latest(self) -> str | None:
        """The path of the latest complete checkpoint, after waiting for one being written."""
        return next(reversed(self.checkpoints), None)

    @property
    def latest_checkpoint(self) -> str | None:
        """The same as `latest`, under its name in TensorFlow."""
        return self.latest

    @property
    def report(self) -> RestoreReport | None:
        """The report of the last `restore_or_initialize` that restored a checkpoint."""
        return self._report

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        options: object = None,
    ) -> str | None:
        """Save the checkpoint, if one is due, and return the path, or None.

        All workers must call it. The checkpoint is complete when it returns; with
        `asynchronous=True`, when `sync` has returned, or the next `save` that saves something.

        Args:
          checkpoint_number: The number of the checkpoint, which must be larger than the latest one;
            by default one more.
          check_interval: Whether to do nothing when `checkpoint_interval` is not over.
          options: Accepted for compatibility with TensorFlow, and ignored.
        """
        del options
        step = None if self._step_counter is None else int(self._step_counter)
        failed = self._saving is not None and self._saving.has_failed
        if check_interval and not failed and not self._is_due(step):
            return None
        self.sync()
        number = None if checkpoint_number is None else self._checked(checkpoint_number)
        self._saving = self._checkpoint._begin_save(
            Numbered(self._directory, self._name, number), afterwards=self._retention.apply
        )
        self._last_step = step
        path = str(self._saving.path)
        if not self._asynchronous:
            self.sync()
        return path

    def sync(self) -> None:
        """Wait until the checkpoint that is being written is complete. All workers must call it."""
        saving = self._saving
        if saving is None:
            return
        try:
            saving.finish()
        finally:
            if saving.finished:
                self._saving = None
                if saving.failed:
                    self._last_step = None  # the next one is due at once

    def restore_or_initialize(self) -> str | None:
        """Restore the latest checkpoint; without one, call `init_fn`. All workers must call it.

        The checkpoint must have values for every object; to restore only some, use
        `checkpoint.restore(manager.latest)`.

        Returns:
          The path of the checkpoint, or None.
        """
        self.sync()
        finish_earlier(self._directory)
        # Workers may look at a directory at different times, and may have their own directories.
        own = on_all_workers(f"look into {self._directory}", self._complete)
        path = all_gather("looking for the latest checkpoint", own[-1] if own else None)[0]
        if path is None:
            if self._init_fn is not None:
                self._init_fn()
            return None
        try:
            self._report = self._checkpoint._restore_from(path, partial=False)
        except InvalidCheckpoint as error:
            earlier = [each for each in self._complete() if each != path]
            raise InvalidCheckpoint(
                f"{error} It is the latest of its directory: to resume from the one before, remove "
                f"it. Earlier ones are {', '.join(reversed(earlier)) or 'not there'}."
            ) from error
        if self._step_counter is not None:
            self._last_step = int(self._step_counter)
        return path

    def close(self) -> None:
        """Call `sync`, by its more usual name; the manager can still be used."""
        self.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # After an error the other workers may never call `sync`, and what is written in the
        # background is either complete or does not exist.
        if error is None:
            self.close()

    def _is_due(self, step: int | None) -> bool:
        if self._interval is None or step is None or self._last_step is None:
            return True
        # It is also due after an older checkpoint has been restored.
        return step < self._last_step or step - self._last_step >= self._interval

    def _complete(self) -> list[str]:
        return [str(path) for path in self._retention.managed()]

    def _checked(self, number: Any) -> int:
        given = number
        try:
            number = operator.index(number)
        except TypeError:
            number = int(number)  # The number may be a variable.
        if number < 0 or (isinstance(given, float) and number != given):
            raise InvalidArgument(f"Checkpoints have whole numbers from 0; got {given!r}.")
        begun = Numbered(self._directory, self._name).taken()
        latest = max(files.numbered(self._directory, self._name), default=-1)
        if number <= latest or number in begun:
            there = max(number, latest)
            raise InvalidArgument(
                f"The checkpoint would get number {number}, and there is {self._name}-{there} in "
                f"{self._directory} already. Numbers must grow; remove the later ones, or use "
                "another directory."
            )
        return number

    def __repr__(self) -> str:
        return f"<rx.CheckpointManager of {self._checkpoint!r} in {self._directory}>"
