"""The state of a program, saved and restored together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from replicax import _context
from replicax._context import ContextKind
from replicax.checkpoint import _files as files
from replicax.checkpoint._inventory import Inventory
from replicax.checkpoint._report import RestoreReport
from replicax.checkpoint._restoring import any_has_one, restore
from replicax.checkpoint._saving import Exact, Numbered, Saving, Target, begin
from replicax.errors import ContextError, InvalidArgument, InvalidType

PathLike = str | os.PathLike[str]


@final
class Checkpoint:
    """Objects whose state is saved and restored together.

    These are variables, optimizers, models, iterators over distributed datasets, arrays, plain
    numbers, and nests of these. They are attributes of the checkpoint, through which plain numbers
    can be changed.

    >>> import tempfile, replicax as rx
    >>> strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
    >>> with strategy.scope():
    ...     weight = rx.Variable([1.0, 2.0])
    >>> checkpoint = rx.Checkpoint(weight=weight, epoch=0)
    >>> checkpoint.epoch += 1
    >>> directory = tempfile.TemporaryDirectory()
    >>> path = checkpoint.save(f"{directory.name}/model")
    >>> _ = weight.assign([0.0, 0.0])
    >>> checkpoint.restore(path).restored
    ('weight', 'epoch')
    >>> weight.numpy().tolist(), checkpoint.epoch
    ([1.0, 2.0], 1)
    >>> directory.cleanup()
    """

    _objects: dict[str, object]
    _saves: int
    _run_calls: int
    _savings: list[Saving]
    _report: RestoreReport | None

    def __init__(self, **objects: Any) -> None:
        """Take `objects`, known by these names in the checkpoint and as its attributes."""
        for name in objects:
            _require_free(name)
        Inventory(objects)  # refuses objects that a checkpoint cannot hold
        self._set(_objects=objects, _saves=0, _run_calls=0, _savings=[], _report=None)

    def _set(self, **own: object) -> None:
        """Set attributes of the checkpoint itself, which are not among its objects."""
        for name, value in own.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_objects")[name]
        except KeyError:
            raise AttributeError(f"The checkpoint has no object {name!r}.") from None

    def __setattr__(self, name: str, thing: object) -> None:
        """Add an object to the checkpoint, or replace the one of the same name.

        If there was no such object when a checkpoint was restored, and the checkpoint has values
        for it, they are restored now; in that case all workers must set it.
        """
        _require_free(name)
        own = {name: thing}
        names = Inventory(own).names
        if self._report is not None:
            if name not in self._objects:
                _restore_late(self._report, own := {**self._objects, name: thing}, name)
            self._report.learn(names)
        self._objects[name] = own[name]

    @property
    def save_counter(self) -> int:
        """The number of saves so far, including those before the checkpoint that was restored."""
        return self._saves

    def _count_run_call(self) -> None:
        """Count a call of `PreemptionCheckpointHandler.run`."""
        self._set(_run_calls=self._run_calls + 1)

    def save(self, prefix: PathLike, options: object = None) -> str:
        """Save all objects, and return the path: `prefix-1`, `prefix-2` and so on.

        All workers must call it; it returns when the checkpoint is complete. Workers with the same
        prefix share one checkpoint, in a directory that all of them see.

        Args:
          prefix: A directory, and the beginning of the checkpoints' names.
          options: Accepted for compatibility with TensorFlow, and ignored.
        """
        del options
        stem = local_path(prefix)
        _require_name(prefix, "The prefix of checkpoints is a directory, and how their names begin")
        saving = self._begin_save(Numbered(stem.parent, stem.name))
        saving.finish()
        return str(saving.path)

    def write(self, path: PathLike, options: object = None) -> str:
        """Save all objects to exactly this path, and return it; `save_counter` is unchanged.

        An existing checkpoint is replaced when the new one is complete. In all other respects this
        is the same as `save`.

        Args:
          path: The path of the checkpoint.
          options: Accepted for compatibility with TensorFlow, and ignored.
        """
        del options
        exact = local_path(path)
        _require_name(path, "The path of a checkpoint is a directory, and its name there")
        saving = self._begin_save(Exact(exact.parent, exact.name))
        saving.finish()
        return str(saving.path)

    def restore(self, path: PathLike | None, options: object = None) -> RestoreReport:
        """Give the objects the values that they had when `path` was saved.

        All workers must call it. Everything is read and checked first: if something does not fit,
        or the checkpoint is damaged, nothing is changed anywhere. Values that only the checkpoint
        has, or only the objects have, are not an error: the report lists them, and its
        `assert_consumed()` raises. Values that only the checkpoint has are restored when an
        attribute of that name is set.

        Args:
          path: The path that `save` returned; a checkpoint that is still being written is awaited.
            None, which `rx.latest_checkpoint` returns if there is no checkpoint, restores nothing.
          options: Accepted for compatibility with TensorFlow, and ignored.
        """
        del options
        return self._restore_from(path, partial=True)

    def read(self, path: PathLike, options: Any = None) -> RestoreReport:
        """Restore the output of `write`, as `restore` does, but leave `save_counter` unchanged.

        Args:
          path: The path of the checkpoint.
          options: Accepted for compatibility with TensorFlow, and ignored.
        """
        del options
        return self._restore_from(local_path(path), partial=True, counts=False)

    def sync(self) -> None:
        """Wait until all saves of this checkpoint are complete. All workers must call it.

        Only managers with `asynchronous=True` leave something to wait for.
        """
        for saving in list(self._savings):
            try:
                saving.finish()
            finally:
                if saving.finished and saving in self._savings:
                    self._savings.remove(saving)

    def _begin_save(self, target: Target, afterwards: Callable[[], None] = lambda: None) -> Saving:
        """Copy the values, and begin to write them; for `CheckpointManager`."""
        require_outside("save")
        saves = self._saves + (not target.replaces)
        inventory = Inventory(self._objects)
        saving = begin(inventory, target, saves, self._run_calls, afterwards)
        unfinished = [each for each in self._savings if not each.finished]
        self._set(_saves=saves, _savings=[*unfinished, saving])
        return saving

    def _restore_from(
        self, path: PathLike | None, *, partial: bool, counts: bool = True
    ) -> RestoreReport:
        """Restore a checkpoint; for `CheckpointManager`.

        Args:
          path: The path of the checkpoint; None restores nothing.
          partial: Whether the checkpoint may lack values for some objects.
          counts: Whether to continue the counts of the checkpoint.
        """
        require_outside("restore")
        place = None if path is None else local_path(path)
        if not any_has_one(place):
            return RestoreReport(None)
        assert place is not None
        report, manifest = restore(Inventory(self._objects), place, partial=partial)
        self._set(_report=report)
        if counts:
            self._set(_saves=manifest.saves, _run_calls=manifest.run_calls)
        return report

    def __repr__(self) -> str:
        return f"<rx.Checkpoint of {', '.join(self._objects) or 'nothing'}>"


def _restore_late(report: RestoreReport, objects: dict[str, Any], name: str) -> None:
    """Give the object `name` its values from the checkpoint that was restored last."""
    waiting = report.unused_under(name)
    if waiting:
        assert report.path is not None  # if it were None, nothing would be unused
        require_outside("restore")
        inventory = Inventory(objects, only=name)
        later, _ = restore(inventory, Path(report.path), partial=True, wanted=waiting)
        report.extend(name, later)


def _require_free(name: str) -> None:
    if name in vars(Checkpoint) or name.startswith("_"):
        raise InvalidArgument(
            f"A checkpoint cannot have an object of the name {name!r}: that is one of its own "
            "attributes, or begins with an underscore. Give it another name."
        )


def _require_name(path: PathLike, what: str) -> None:
    if os.path.basename(os.fspath(path)) in ("", ".", ".."):
        raise InvalidArgument(
            f"{what}, such as 'run/model'; got {os.fspath(path)!r}, where there is no name."
        )
    require_usable(os.path.basename(os.fspath(path)))


def require_usable(name: str) -> None:
    """Refuse checkpoint names that are reserved."""
    if files.is_reserved(name):
        raise InvalidArgument(
            f"A checkpoint cannot be called {name!r}: names with '.writing-' in them, or with "
            "'.deleted' at the end, are those of leftovers, which are removed. Give another name."
        )


def local_path(path: PathLike) -> Path:
    """Return an absolute path; refuse URLs of object stores, which would become odd file names."""
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidType(f"A checkpoint has a path; got {path!r}. Give a str or a `pathlib.Path`.")
    text = os.fspath(path)
    if "://" in text:
        raise InvalidArgument(
            f"Checkpoints are kept in directories of this machine, or mounted there; got {text!r}. "
            "Mount the bucket, and give the path there."
        )
    if "\0" in text:
        raise InvalidArgument(f"A path cannot have a NUL in it; got {text!r}. Give another one.")
    return Path(text).absolute()


def require_outside(method: str, of: str = "a checkpoint") -> None:
    """Raise if the state of a program cannot be saved or restored in the current context."""
    frame = _context.current()
    if frame.program is not None or frame.overlay is not None:
        raise ContextError(
            f"`{method}` of {of} was called while a function is traced or differentiated, where "
            "variables have no numbers. Call it outside."
        )
    if frame.kind is not ContextKind.CROSS_REPLICA and frame.strategy is not None:
        raise ContextError(
            f"`{method}` of {of} is for all replicas together. Current context: {frame}. Call it "
            "outside the function given to `run`."
        )
