"""Checkpoints on disk: directories that are complete or not there, written and read by Orbax."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import secrets
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from replicax.checkpoint._manifest import Manifest, Unusable, checksum_of
from replicax.errors import CheckpointError, CheckpointNotFound, InvalidCheckpoint

# `ckpt-2` is written in a directory `ckpt-2.writing-` and a word of this save's own, with a file
# that is locked as long as somebody writes there. It gets its name when it is complete.
_WRITING, _LOCK = ".writing-", "lock"
_OLD_SECONDS = 24 * 3600.0  # where files cannot be locked, nobody writes for longer than that
_DELETED = ".deleted"
_WRITTEN, _REPLACED = "checkpoint", "replaced"  # in that directory
_REPLACEMENT_LOOKS = 100  # each 10 ms after the one before
_MANIFEST, _ARRAYS = "manifest", "arrays"


def load() -> None:
    """Import Orbax, which takes 0.5 s, and is not possible any more when a program ends."""
    import orbax.checkpoint  # noqa: F401  here, because importing replicax should not take that


def write(path: Path, arrays: Mapping[str, np.ndarray], manifest: Manifest, replaces: bool) -> None:
    """Write a checkpoint that is not there at all until it is there as a whole.

    Args:
      path: Of the checkpoint.
      arrays: By name.
      manifest: Everything else.
      replaces: Whether to take the place of another one, which stays until this one is written.
    """
    import orbax.checkpoint as ocp

    manifest = manifest.with_checksums(arrays)
    items: dict[str, Any] = {_MANIFEST: ocp.args.JsonSave(manifest.to_json())}
    # It refuses arrays without elements, of which the manifest says all there is.
    with_elements = {key: array for key, array in arrays.items() if array.size}
    # 64 bits stay 64 bits, also where they become arrays of JAX for a moment.
    with _workplace(path) as workplace, _checkpointer() as checkpointer, jax.enable_x64(True):
        if with_elements:
            items[_ARRAYS] = ocp.args.PyTreeSave(_writable(with_elements))
        written = workplace / _WRITTEN
        checkpointer.save(written, ocp.args.Composite(**items))
        _bring_to_disk(written)
        if replaces and path.exists():
            # A directory cannot be renamed over another one. A process that is killed in between
            # leaves both where `complete_replacement` finds them.
            path.rename(workplace / _REPLACED)
        # Fails if there is something of this name by now.
        written.rename(path)
        _bring_to_disk(path.parent, deep=False)


@contextlib.contextmanager
def _workplace(path: Path) -> Iterator[Path]:
    """Make a directory next to `path` for one save, locked against those who remove leftovers."""
    while True:
        workplace = path.with_name(f"{path.name}{_WRITING}{secrets.token_hex(8)}")
        workplace.mkdir()
        with _locked(workplace) as locked:
            if locked is False:  # somebody took it for a leftover before it was locked
                continue
            try:
                yield workplace
            finally:
                shutil.rmtree(workplace, ignore_errors=True)
            return


@contextlib.contextmanager
def _locked(workplace: Path) -> Iterator[bool | None]:
    """Keep others out of a directory; yield whether that succeeded, None if it cannot be told.

    The lock of a process ends with it, however that is.
    """
    try:
        lock = os.open(workplace / _LOCK, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:
        yield False
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = os.fstat(lock).st_nlink > 0
        except BlockingIOError:
            locked = False
        except OSError:  # a file system without locks
            locked = None
        yield locked
    finally:
        os.close(lock)


def _bring_to_disk(directory: Path, *, deep: bool = True) -> None:
    """Have the machine write what it keeps in memory, so that names do not precede content."""
    paths = [directory, *(directory.rglob("*") if deep else ())]
    for path in reversed(paths):
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        except OSError:
            if not path.is_dir():  # some file systems refuse directories
                raise
        finally:
            os.close(opened)


def read_manifest(path: Path) -> Manifest:
    """Return what a checkpoint says of itself."""
    import orbax.checkpoint as ocp

    complete_replacement(path)
    _require_checkpoint(path)
    try:
        with _checkpointer() as checkpointer:
            read = checkpointer.restore(
                path, ocp.args.Composite(**{_MANIFEST: ocp.args.JsonRestore()})
            )
        return Manifest.from_json(read[_MANIFEST])
    except Unusable as reason:
        raise InvalidCheckpoint(_unusable(path, str(reason))) from None
    except Exception as error:
        raise InvalidCheckpoint(_unusable(path, f"its manifest cannot be read: {error}")) from error


def read_arrays(path: Path, manifest: Manifest, keys: Collection[str]) -> dict[str, Any]:
    """Return some of its arrays, as the program had them."""
    import orbax.checkpoint as ocp

    facts = {key: manifest.arrays[key] for key in keys}
    read: dict[str, Any] = {
        key: each.without_elements() for key, each in facts.items() if 0 in each.shape
    }
    written = [key for key in keys if key not in read]
    if written:
        how = ocp.args.PyTreeRestore(
            item=dict.fromkeys(written, 0),
            restore_args={key: ocp.RestoreArgs(restore_type=np.ndarray) for key in written},
            partial_restore=True,
        )
        try:
            with _checkpointer() as checkpointer:
                read |= checkpointer.restore(path, ocp.args.Composite(**{_ARRAYS: how}))[_ARRAYS]
        except Exception as error:
            raise InvalidCheckpoint(
                _unusable(path, f"its arrays cannot be read: {error}")
            ) from error
    for key, each in facts.items():
        if checksum_of(read[key]) != each.checksum:
            raise InvalidCheckpoint(
                _unusable(path, f"the array {key!r} is damaged: its checksum is not right")
            )
    return {key: facts[key].value(numbers) for key, numbers in read.items()}


def numbered(directory: Path, name: str) -> dict[int, Path]:
    """Return the complete checkpoints `name-1`, `name-2` and so on of a directory, by number."""
    return {
        number: path
        for number, path in sorted(taken(directory, name).items())
        if is_checkpoint(path)
    }


def latest(directory: Path) -> Path | None:
    """Return the checkpoint that was saved last in a directory, of those with numbers.

    Numbers tell among those of one name. Among names the time does, which is that of the last file
    that was written, and not kept by all programs that copy directories.
    """
    pattern = re.compile(r"(.+)-(\d+)")
    last: dict[str, tuple[int, Path]] = {}
    for path in _entries(directory):
        matched = pattern.fullmatch(path.name)
        if matched and is_checkpoint(path):
            found = (int(matched[2]), path)
            last[matched[1]] = max(found, last.get(matched[1], found))
    return max((path for _, path in last.values()), key=saved_at, default=None)


def is_checkpoint(path: Path) -> bool:
    """Return whether something looks like a complete checkpoint."""
    return (path / _MANIFEST).is_dir()


def saved_at(path: Path) -> float:
    """Return when a checkpoint was written, in seconds since 1970; 0 if it is gone by now."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def taken(directory: Path, name: str) -> dict[int, Path]:
    """Return everything that has the name of a checkpoint, whatever it is."""
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    matches = ((pattern.fullmatch(path.name), path) for path in _entries(directory))
    return {int(matched[1]): path for matched, path in matches if matched}


def _entries(directory: Path) -> list[Path]:
    """List a directory; nothing, if there is none."""
    try:
        with os.scandir(directory) as entries:
            return [Path(entry.path) for entry in entries]
    except FileNotFoundError:
        return []
    except OSError as error:
        # Not to be taken for an empty one: a run would begin anew.
        raise CheckpointError(
            f"The directory of checkpoints {directory} cannot be listed: {error}. Make it one that "
            "this process can read."
        ) from error


def remove(path: Path) -> None:
    """Remove a checkpoint; one whose removal is cut off does not look like one any more."""
    deleted = path.with_name(path.name + _DELETED)
    path.rename(deleted)
    shutil.rmtree(deleted, ignore_errors=True)


def remove_leftovers(directory: Path, names: str) -> None:
    """Remove what was left of checkpoints when writing or removing them was cut off.

    Args:
      directory: Where.
      names: A regular expression for the names of the checkpoints.
    """
    pattern = re.compile(rf"(?:{names})({re.escape(_WRITING)}.*|{re.escape(_DELETED)})")
    for path in _entries(directory):
        matched = pattern.fullmatch(path.name)
        if matched and matched[1] == _DELETED:
            shutil.rmtree(path, ignore_errors=True)
        elif matched:
            with _locked(path) as locked:
                if locked or (locked is None and _is_old(path)):
                    shutil.rmtree(path, ignore_errors=True)


def complete_replacement(path: Path) -> None:
    """Give a checkpoint its name whose writer was killed when it had moved the old one aside."""
    pattern = f"{glob.escape(path.name + _WRITING)}*/{_REPLACED}"
    for _ in range(_REPLACEMENT_LOOKS):
        replaced = None if path.exists() else next(path.parent.glob(pattern), None)
        if replaced is None:
            return
        with _locked(replaced.parent) as locked:
            if locked or (locked is None and _is_old(replaced.parent)):
                with contextlib.suppress(OSError):  # another process has been quicker
                    (replaced.parent / _WRITTEN).rename(path)
                return
        time.sleep(0.01)  # its writer is between the two renames


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > _OLD_SECONDS


def _checkpointer() -> Any:
    """Make an Orbax checkpointer for this process alone: who writes is agreed on elsewhere."""
    import orbax.checkpoint as ocp

    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=here, active_processes={here})
    types = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler()),
        (
            jax.Array,
            ocp.type_handlers.ArrayHandler(
                primary_host=here,
                replica_id=here,
                use_replica_parallel=False,
                enable_write_sharding_file=False,
            ),
        ),
    )
    handlers = ocp.DefaultCheckpointHandlerRegistry()
    arrays = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone, type_handler_registry=types)
    for how in (ocp.args.PyTreeSave, ocp.args.PyTreeRestore):
        handlers.add(_ARRAYS, how, arrays)
    manifest = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
    for how in (ocp.args.JsonSave, ocp.args.JsonRestore):
        handlers.add(_MANIFEST, how, manifest)
    return ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(
            handler_registry=handlers,
            composite_options=ocp.CompositeOptions(
                multiprocessing_options=alone,
                # It would tell others of directories that it made by a name that all saves share.
                async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            ),
        ),
        multiprocessing_options=alone,
    )


def _writable(arrays: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
    """Return arrays as this process's Orbax writes them.

    It writes those of NumPy in the first process only. Elsewhere they become arrays of which all
    processes have a copy, so that this one's has its index.
    """
    if jax.process_index() == 0:
        return arrays
    everywhere = [jax.local_devices(process_index=i)[0] for i in range(jax.process_count())]
    mesh = Mesh(np.array(everywhere), ("process",), axis_types=(AxisType.Auto,))
    copies = NamedSharding(mesh, PartitionSpec())
    return {
        key: jax.make_array_from_single_device_arrays(
            array.shape, copies, [jax.device_put(array, jax.local_devices()[0])]
        )
        for key, array in arrays.items()
    }


def _require_checkpoint(path: Path) -> None:
    if not path.exists():
        raise CheckpointNotFound(
            f"There is no checkpoint {path}. {_neighbours(path)} Give the path that `save` "
            "returned."
        )
    if _WRITING in path.name or path.name.endswith(_DELETED):
        raise InvalidCheckpoint(_unusable(path, "writing it, or removing it, was cut off"))
    if not (path / _MANIFEST).is_dir():
        what = "it is a file" if path.is_file() else "it has no manifest"
        raise InvalidCheckpoint(_unusable(path, f"{what}, so it is not one that replicax wrote"))


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f"Nor is there a directory {path.parent}."
    names = sorted(each.name for each in path.parent.iterdir() if each.is_dir())
    return f"In {path.parent} there is {', '.join(names[:10]) or 'no directory'}."


def _unusable(path: Path, reason: str) -> str:
    return (
        f"{path} cannot be restored: {reason}. Give the path of a checkpoint that `rx.Checkpoint` "
        "has saved; nothing has been changed."
    )
