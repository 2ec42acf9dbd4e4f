"""A callback that lets an interrupted `fit` resume as if nothing had happened."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import keras
import numpy as np

from replicax import _bridges
from replicax._typing import Json
from replicax.checkpoint import Checkpoint, CheckpointManager
from replicax.errors import InvalidArgument
from replicax.integrations.keras._hooks import at_the_end_of_fit, elements_of, require_jax
from replicax.integrations.keras._order import generators, set_generators
from replicax.integrations.keras._private import begin_at


@final
class BackupAndRestore(keras.callbacks.Callback):
    """A callback that resumes an interrupted `fit`: in the same epoch, after the same step.

    It saves weights, optimizer slots, seeds, metrics, and the position in the data, so that each
    example is seen as often as it would have been. A distributed dataset resumes from its own
    state. With other data, the batches already seen are read again and skipped; arrays are shuffled
    in the same order.

    The state of other callbacks is not saved. For the skipped steps of the resumed epoch, they are
    called with the restored metrics.

    Args:
      backup_dir: The directory for backups. All workers must see it. It is removed when `fit`
        completes.
      save_freq: `"epoch"`, or the number of steps between backups.
      delete_checkpoint: Whether to remove the backup when `fit` completes.

    >>> import os, tempfile, numpy as np, replicax as rx
    >>> os.environ["KERAS_BACKEND"] = "jax"
    >>> import keras
    >>> directory = tempfile.TemporaryDirectory()
    >>> with rx.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x, y = np.ones((8, 3), np.float32), np.ones((8, 1), np.float32)
    >>> backup = rx.BackupAndRestore(f"{directory.name}/backup", save_freq=2)
    >>> history = model.fit(x, y, batch_size=2, callbacks=[backup], verbose=0)
    >>> os.listdir(directory.name)
    []
    >>> directory.cleanup()
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        require_jax()
        _bridges.load()  # even if no scope is entered
        if save_freq != "epoch" and (not isinstance(save_freq, int) or save_freq < 1):
            raise InvalidArgument(
                f"`save_freq` is 'epoch' or a positive number of steps; got {save_freq!r}."
            )
        self._directory = Path(backup_dir)
        self._steps = save_freq if isinstance(save_freq, int) else None
        self._delete = delete_checkpoint

    def on_train_begin(self, logs: object = None) -> None:
        # Read once: each `self.model` makes Keras copy the values of the last step to variables.
        self._fitted: Any = self.model
        self._progress = _Progress(self._fitted)
        checkpoint = Checkpoint(model=self._fitted, progress=self._progress)
        self._manager = CheckpointManager(
            checkpoint, self._directory, max_to_keep=1, asynchronous=True
        )
        self._restored = self._manager.restore_or_initialize() is not None
        self._unsaved = 0
        if self._restored:
            begin_at(self._fitted, self._progress.epoch)
            # Keras resets metrics when an epoch begins.
            self._metrics = [np.asarray(v.value) for v in self._fitted.metrics_variables]
        self._progress.take_part()
        at_the_end_of_fit(self._fitted, self._put_in_order)

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._last_batch = -1
        if self._restored and self._progress.calls:
            variables = self._fitted.metrics_variables
            for variable, value in zip(variables, self._metrics, strict=True):
                variable.assign(value)
            self._progress.pass_over(self._fitted.get_metrics_result())
        self._restored = False

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        made, self._last_batch = batch - self._last_batch, batch
        if self._steps is None or self._progress.passing:
            return
        self._unsaved += made
        if self._unsaved >= self._steps:
            self._save()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self._progress.end_epoch(epoch)
        if self._steps is None:
            self._save()

    def on_train_end(self, logs: object = None) -> None:
        self._manager.close()
        if self._delete:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _put_in_order(self) -> None:
        self._progress.leave()
        begin_at(self._fitted, None)

    def _save(self) -> None:
        self._unsaved = 0
        self._fitted.jax_state_sync()
        self._manager.save()


@final
class _Progress:
    """The progress of a `fit`, including the position in its data.

    It replaces the model's train function in order to see what is read. Checkpoints use its
    `get_state` and `set_state`.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._elements = elements_of(model)
        self._reading: _Reading | None = None
        self._resumed: dict[str, Any] | None = None
        self._to_pass, self._logs = 0, None
        self.epoch, self.calls = 0, 0  # calls to the train function in this epoch

    def take_part(self) -> None:
        self._train: Any = self._model.train_function
        setattr(self._model, "train_function", self._step)  # noqa: B010  typed as None in Keras

    def leave(self) -> None:
        self._model.train_function = self._train

    @property
    def passing(self) -> bool:
        """True if the last step was skipped because it had been run before."""
        return self._logs is not None

    def pass_over(self, logs: object) -> None:
        """Skip the steps of this epoch that were run before: Keras only counts them."""
        self._to_pass, self._logs = self.calls, logs

    def end_epoch(self, epoch: int) -> None:
        self.epoch, self.calls, self._logs = epoch + 1, 0, None

    def get_state(self) -> dict[str, Json]:
        reading, now = self._reading, generators()
        if reading is not None and (self._elements or reading).is_over():
            reading = None  # the next batch belongs to another pass
        return {
            "epoch": self.epoch,
            "calls": self.calls,
            "taken": 0 if reading is None else reading.taken,
            "before": None if reading is None else reading.before,
            "now": now,
            "elements": reading and self._elements and self._elements.get_state(),
        }

    def set_state(self, state: dict[str, Json]) -> None:
        self.epoch, self.calls, self._resumed = state["epoch"], state["calls"], state

    def _step(self, state: object, iterator: Iterator[object]) -> Any:
        if self._to_pass:
            self._to_pass -= 1
            return self._logs, state
        if self._reading is None or self._reading.iterator is not iterator:
            self._reading = self._begun(iterator)
        self._logs = None
        self.calls += 1
        return self._train(state, self._reading)

    def _begun(self, iterator: Iterator[object]) -> _Reading:
        """Begin a pass, or resume the one that was interrupted."""
        state, self._resumed = self._resumed, None
        if state is None:
            return _Reading(iterator, generators())
        before = state["before"] or state["now"]
        set_generators(before)  # the order is drawn when the first batch is read
        reading = _Reading(iterator, before)
        if self._elements is not None:
            self._elements.resume(state["elements"])  # takes effect with its first batch
            reading.taken = state["taken"]
        else:
            for _ in range(state["taken"]):
                next(reading)
        if state["taken"]:
            set_generators(state["now"])
        return reading


@final
class _Reading:
    """A pass over the data, and the number of batches taken."""

    def __init__(self, iterator: Iterator[Any], before: Any) -> None:
        self.iterator, self.taken = iterator, 0
        self.before = before  # the states of the random generators when it began
        self._looked_at: list[object] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = self._looked_at.pop() if self._looked_at else next(self.iterator)
        self.taken += 1
        return batch

    def is_over(self) -> bool:
        """Tell whether the pass has ended, by peeking at the next batch without consuming it."""
        if not self._looked_at:
            try:
                self._looked_at.append(next(self.iterator))
            except StopIteration:
                return True
        return False
