"""The state of a program, saved and restored together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from replicax import _context
from replicax._context import Kind
from replicax.checkpoint._inventory import Inventory
from replicax.checkpoint._report import RestoreReport
from replicax.checkpoint._restoring import restore
from replicax.checkpoint._saving import Saving, Target, begin
from replicax.errors import ContextError, InvalidArgument, InvalidType

PathLike = str | os.PathLike[str]


@final
class Checkpoint:
    """Objects whose state is saved, and restored, together.

    Variables, optimizers, models, iterators over distributed datasets, arrays and plain numbers;
    and nests of these. They are attributes of the checkpoint: plain numbers are counted there.

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

    _objects: dict[str, Any]
    _saves: int

    def __init__(self, **objects: Any) -> None:
        """`objects` are known by these names, in the checkpoint and as attributes of this."""
        taken = [name for name in objects if name in vars(Checkpoint) or name.startswith("_")]
        if taken:
            raise InvalidArgument(
                f"A checkpoint cannot have an object of the name {taken[0]!r}: that is one of its "
                "own attributes, or begins with an underscore. Give it another name."
            )
        object.__setattr__(self, "_objects", objects)
        object.__setattr__(self, "_saves", 0)
        Inventory(objects)  # so that what it cannot hold is refused now

    def __getattr__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self, "_objects")[name]
        except KeyError:
            raise AttributeError(f"The checkpoint has no object {name!r}.") from None

    def __setattr__(self, name: str, thing: Any) -> None:
        if name in vars(Checkpoint) or name.startswith("_"):
            raise InvalidArgument(
                f"A checkpoint cannot have an object of the name {name!r}: that is one of its own "
                "attributes, or begins with an underscore. Give it another name."
            )
        Inventory({name: thing})
        self._objects[name] = thing

    @property
    def save_counter(self) -> int:
        """How many times it has been saved, counting those before the one that was restored."""
        return self._saves

    def save(self, prefix: PathLike) -> str:
        """Saves all objects, and returns the path: `prefix-1`, `prefix-2` and so on.

        All workers call it, and return when the checkpoint is complete. Those with the same prefix
        share one checkpoint, in a directory that all of them see.

        Args:
          prefix: A directory, and how the names of checkpoints begin.
        """
        stem = local_path(prefix)
        if os.path.basename(os.fspath(prefix)) in ("", ".", ".."):
            raise InvalidArgument(
                "The prefix of checkpoints is a directory, and how their names begin, such as "
                f"'run/model'; got {os.fspath(prefix)!r}, where there is no name."
            )
        saving = self.begin_save(stem.parent, stem.name)
        saving.finish()
        return str(saving.path)

    def restore(self, path: PathLike) -> RestoreReport:
        """Gives the objects the values that they had when `path` was saved.

        All workers call it. Everything is read and checked first: if something does not fit, or
        the checkpoint is damaged, nothing is changed anywhere. What only the checkpoint has, or
        only the objects, is no error; the report tells, and `assert_consumed()` makes it one.

        Args:
          path: What `save` returned.
        """
        return self.restore_from(local_path(path), partial=True)

    def begin_save(
        self,
        directory: Path,
        name: str,
        number: int | None = None,
        afterwards: Callable[[], None] = lambda: None,
    ) -> Saving:
        """Takes the values, and lets them be written; for `CheckpointManager`."""
        _require_outside("save")
        inventory = Inventory(self._objects)
        saving = begin(inventory, Target(directory, name, number), self._saves, afterwards)
        object.__setattr__(self, "_saves", self._saves + 1)
        return saving

    def restore_from(self, path: Path, *, partial: bool) -> RestoreReport:
        """The same as `restore`; unless `partial`, every object has to find something."""
        _require_outside("restore")
        report, saves = restore(Inventory(self._objects), path, partial=partial)
        object.__setattr__(self, "_saves", saves)
        return report

    def __repr__(self) -> str:
        return f"<rx.Checkpoint of {', '.join(self._objects) or 'nothing'}>"


def local_path(path: PathLike) -> Path:
    """An absolute path; refuses addresses of object stores, which would become odd local names."""
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidType(
            f"A checkpoint has a path; got {path!r}. `latest` of a manager is None where there is "
            "no checkpoint: `restore_or_initialize` takes care of that."
        )
    text = os.fspath(path)
    if "://" in text:
        raise InvalidArgument(
            f"Checkpoints are kept in directories of this machine, or mounted there; got {text!r}. "
            "Mount the bucket, and give the path there."
        )
    return Path(text).absolute()


def _require_outside(method: str) -> None:
    frame = _context.current()
    if frame.program is not None or frame.overlay is not None:
        raise ContextError(
            f"`{method}` of a checkpoint was called while a function is traced or differentiated, "
            "where variables have no numbers. Call it outside."
        )
    if frame.kind is not Kind.CROSS_REPLICA and frame.strategy is not None:
        raise ContextError(
            f"`{method}` of a checkpoint is for all replicas together. Current context: {frame}. "
            "Call it outside the function given to `run`."
        )
