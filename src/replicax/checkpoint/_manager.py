"""The checkpoints of a run: which are kept, which is the latest, when the next is due."""

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
from replicax.checkpoint._restoring import on_all_workers
from replicax.checkpoint._retention import Retention
from replicax.checkpoint._saving import Numbered, Saving, finish_earlier, meet
from replicax.errors import InvalidArgument, InvalidCheckpoint, InvalidType


@final
class CheckpointManager:
    """Saves a checkpoint again and again, in a directory, and keeps the latest ones.

    Args:
      checkpoint: What is saved.
      directory: Where. All workers have to see it; those of one run name the same.
      max_to_keep: How many checkpoints are kept; None for all.
      keep_checkpoint_every_n_hours: Of those that are too many, one is kept for good if so many
        hours have passed since the last one that was, or since the first manager was made.
      checkpoint_name: How the names of checkpoints begin.
      step_counter: A variable that counts steps, for `checkpoint_interval`.
      checkpoint_interval: After how many steps the next checkpoint is due; `save` does nothing
        before.
      init_fn: What `restore_or_initialize` calls if there is no checkpoint.
      asynchronous: Whether `save` returns as soon as the values are taken, and a thread writes them
        while the program goes on. What goes wrong there is raised by a later call. At the end of
        the program, `close` the manager, or use it in a `with`.

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
        init_fn: Callable[[], Any] | None = None,
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
        """Where the checkpoints are."""
        return str(self._directory)

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved."""
        return self._checkpoint

    @property
    def checkpoint_interval(self) -> int | None:
        """After how many steps the next checkpoint is due."""
        return self._interval

    @property
    def checkpoints(self) -> list[str]:
        """The paths of all complete checkpoints, the latest last; but not those kept for good.

        What is being written is waited for, as `sync` does.
        """
        self.sync()
        return self._complete()

    @property
    def latest(self) -> str | None:
        """The path of the latest complete checkpoint; what is being written is waited for."""
        return next(reversed(self.checkpoints), None)

    @property
    def latest_checkpoint(self) -> str | None:
        """The same as `latest`, by the name that TensorFlow has for it."""
        return self.latest

    @property
    def report(self) -> RestoreReport | None:
        """What the last `restore_or_initialize` restored."""
        return self._report

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        options: Any = None,
    ) -> str | None:
        """Save the checkpoint, if one is due, and return the path, or None.

        All workers call it. The checkpoint is complete when it returns; with `asynchronous=True`,
        when `sync` has returned, or the next `save` that saves something.

        Args:
          checkpoint_number: Its number, which must be larger than that of the latest; by default
            one more.
          check_interval: Whether to do nothing when `checkpoint_interval` is not over.
          options: Accepted for the sake of programs written for TensorFlow, and not looked at.
        """
        del options
        step = None if self._step_counter is None else int(self._step_counter)
        failed = self._saving is not None and self._saving.has_failed
        if check_interval and not failed and not self._is_due(step):
            return None
        self.sync()
        number = None if checkpoint_number is None else self._checked(checkpoint_number)
        self._saving = self._checkpoint.begin_save(
            Numbered(self._directory, self._name, number), afterwards=self._retention.apply
        )
        self._last_step = step
        path = str(self._saving.path)
        if not self._asynchronous:
            self.sync()
        return path

    def sync(self) -> None:
        """Wait until the checkpoint that is being written is complete. All workers call it."""
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
        """Restore the latest checkpoint; without one, call `init_fn`. All workers call it.

        Every object must find something in the checkpoint; to restore a part of them, use
        `checkpoint.restore(manager.latest)`.

        Returns:
          The path of the checkpoint, or None.
        """
        self.sync()
        finish_earlier(self._directory)
        # Workers may look at a directory at different times; and may have directories of their own.
        own = on_all_workers(f"look into {self._directory}", self._complete)
        path = meet("looking for the latest checkpoint", own[-1] if own else None)[0]
        if path is None:
            if self._init_fn is not None:
                self._init_fn()
            return None
        try:
            self._report = self._checkpoint.restore_from(path, partial=False)
        except InvalidCheckpoint as error:
            earlier = [each for each in self._complete() if each != path]
            raise InvalidCheckpoint(
                f"{error} It is the latest of its directory: to go on from the one before, remove "
                f"it. Earlier ones are {', '.join(reversed(earlier)) or 'not there'}."
            ) from error
        if self._step_counter is not None:
            self._last_step = int(self._step_counter)
        return path

    def close(self) -> None:
        """Do the same as `sync`, by the name that things with an end have; it can be used again."""
        self.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # After an error the other workers need not come to `sync`, and what goes on in the
        # background is complete or nothing anyway.
        if error is None:
            self.close()

    def _is_due(self, step: int | None) -> bool:
        if self._interval is None or step is None or self._last_step is None:
            return True
        # Also after an older checkpoint has been restored.
        return step < self._last_step or step - self._last_step >= self._interval

    def _complete(self) -> list[str]:
        return [str(path) for path in self._retention.managed()]

    def _checked(self, number: Any) -> int:
        given = number
        try:
            number = operator.index(number)
        except TypeError:
            number = int(number)  # of a variable
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
