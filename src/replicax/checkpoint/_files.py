"""Checkpoints on disk: directories, either complete or absent, written and read by Orbax."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from replicax.checkpoint._failures import orbax_silent, reason, system_error
from replicax.checkpoint._manifest import Manifest, Unusable
from replicax.checkpoint._orbax import ARRAYS, MANIFEST, checkpointer_here, writable
from replicax.errors import CheckpointError, CheckpointNotFound, InvalidCheckpoint

# `ckpt-2` is written in a directory `ckpt-2.writing-` with a random suffix, in which a file is
# locked while a process writes there. The checkpoint gets its name when it is complete.
_WRITING, _LOCK = ".writing-", "lock"
_OLD_SECONDS = 24 * 3600.0  # Used where there are no file locks: no process writes for longer.
_DELETED = ".deleted"
_WRITTEN, _REPLACED = "checkpoint", "replaced"  # in that directory
_REPLACEMENT_LOOKS = 100  # one every 10 ms
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


def is_reserved(name: str) -> bool:
    """Return whether a name says that writing or removing a checkpoint was interrupted."""
    return _WRITING in name or name.endswith(_DELETED)


def load() -> None:
    """Import Orbax, which takes 0.5 s and is no longer possible when a program is exiting."""
    import orbax.checkpoint  # noqa: F401  here, as importing replicax should not take that long


def write(path: Path, arrays: Mapping[str, np.ndarray], manifest: Manifest, replaces: bool) -> None:
    """Write a checkpoint atomically: it does not exist at all until it is complete.

    Args:
      path: The path of the checkpoint.
      arrays: The arrays, by name.
      manifest: Everything else.
      replaces: Whether to replace an existing checkpoint, which stays until this one is written.
    """
    with workplace(path) as place:
        publish(write_into(place, arrays, manifest), path, replaces)


def write_into(place: Path, arrays: Mapping[str, np.ndarray], manifest: Manifest) -> Path:
    """Write a checkpoint in a workplace, and return its path there."""
    import orbax.checkpoint as ocp

    manifest = manifest.with_checksums(arrays)
    items: dict[str, Any] = {MANIFEST: ocp.args.JsonSave(manifest.to_json())}
    # Orbax refuses arrays without elements; the manifest says everything about them.
    with_elements = {key: array for key, array in arrays.items() if array.size}
    written = place / _WRITTEN
    # 64-bit numbers must stay 64-bit, even where they briefly become arrays of JAX.
    with checkpointer_here() as checkpointer, jax.enable_x64(True):
        if with_elements:
            items[ARRAYS] = ocp.args.PyTreeSave(writable(with_elements))
        with orbax_silent():
            checkpointer.save(written, ocp.args.Composite(**items))
    return written


def publish(written: Path, path: Path, replaces: bool, *, flushes: bool = True) -> None:
    """Give a checkpoint that was written in a workplace its name."""
    _bring_to_disk(written)
    if replaces and path.exists():
        # A directory cannot be renamed over another one. A process killed between the two renames
        # leaves both checkpoints where `complete_replacement` finds them.
        path.rename(written.with_name(_REPLACED))
    # This fails if something with this name exists by now.
    written.rename(path)
    if flushes:
        _bring_to_disk(path.parent, deep=False)


@contextlib.contextmanager
def workplace(path: Path) -> Iterator[Path]:
    """Make a directory next to `path` for one save, locked against the removal of leftovers."""
    while True:
        place = path.with_name(f"{path.name}{_WRITING}{secrets.token_hex(8)}")
        place.mkdir()
        with _locked(place) as locked:
            if locked is False:  # another process took it for a leftover before it was locked
                continue
            try:
                yield place
            finally:
                shutil.rmtree(place, ignore_errors=True)
            return


@contextlib.contextmanager
def _locked(workplace: Path) -> Iterator[bool | None]:
    """Lock a directory; yield whether that succeeded, or None if that is unknown.

    The lock of a process ends with the process, however it ends.
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
    """Flush the machine's buffers to disk, so that names do not precede content."""
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
    """Return the manifest of a checkpoint."""
    import orbax.checkpoint as ocp

    try:
        complete_replacement(path)
        _require_checkpoint(path)
        _require_plain(path)
        with checkpointer_here() as checkpointer:
            read = checkpointer.restore(
                path, ocp.args.Composite(**{MANIFEST: ocp.args.JsonRestore()})
            )
        return Manifest.from_json(read[MANIFEST])
    except Unusable as problem:
        raise InvalidCheckpoint(unusable(path, str(problem))) from None
    except CheckpointError:
        raise
    except Exception as error:
        raise _failure(path, "its manifest", error) from system_error(error) or error


def read_arrays(
    path: Path, manifest: Manifest, keys: Collection[str]
) -> dict[str, jax.Array | np.ndarray]:
    """Return some arrays of a checkpoint, as the program had them."""
    import orbax.checkpoint as ocp

    facts = {key: manifest.arrays[key] for key in keys}
    read: dict[str, np.ndarray] = {}
    written = [key for key in keys if 0 not in facts[key].shape]
    if written:
        how = ocp.args.PyTreeRestore(
            item=dict.fromkeys(written, 0),
            restore_args={key: ocp.RestoreArgs(restore_type=np.ndarray) for key in written},
            partial_restore=True,
        )
        try:
            with checkpointer_here() as checkpointer:
                read |= checkpointer.restore(path, ocp.args.Composite(**{ARRAYS: how}))[ARRAYS]
        except Exception as error:
            raise _failure(path, "its arrays", error) from system_error(error) or error
    values = {}
    for key, each in facts.items():
        try:
            values[key] = each.value(read.get(key))
        except Unusable as problem:
            raise InvalidCheckpoint(unusable(path, f"the array {key!r} is {problem}")) from None
    return values


def numbered(directory: Path, name: str) -> dict[int, Path]:
    """Return the complete checkpoints `name-1`, `name-2` and so on of a directory, by number."""
    return {
        number: path
        for number, path in sorted(taken(directory, name).items())
        if is_checkpoint(path)
    }


def latest(directory: Path) -> Path | None:
    """Return the last checkpoint saved in a directory, among those with numbers.

    Checkpoints of one name are compared by number, those of different names by the time of the last
    file written, which not all programs that copy directories preserve.
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
    found = _status(path / MANIFEST)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_there(path: Path) -> bool:
    """Return whether there is anything at a path."""
    return _status(path) is not None


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a path, or None if there is nothing."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return None
        # It must not count as missing: a run would start over.
        raise CheckpointError(_forbidden(path, error)) from error


def saved_at(path: Path) -> float:
    """Return the time a checkpoint was written, in seconds since 1970; 0 if it has been removed."""
    found = _status(path)
    return 0.0 if found is None else found.st_mtime


def taken(directory: Path, name: str) -> dict[int, Path]:
    """Return all paths that have the name of a checkpoint, by number."""
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    matches = ((pattern.fullmatch(path.name), path) for path in _entries(directory))
    return {int(matched[1]): path for matched, path in matches if matched}


def _entries(directory: Path) -> list[Path]:
    """List a directory; return an empty list if it does not exist."""
    try:
        with os.scandir(directory) as entries:
            return [Path(entry.path) for entry in entries]
    except FileNotFoundError:
        return []
    except OSError as error:
        # It must not count as empty: a run would start over.
        raise CheckpointError(
            f"The directory of checkpoints {directory} cannot be listed: {error}. Make it one that "
            "this process can read."
        ) from error


def remove(path: Path) -> None:
    """Remove a checkpoint; if that is interrupted, it no longer looks like a checkpoint."""
    deleted = path.with_name(path.name + _DELETED)
    path.rename(deleted)
    shutil.rmtree(deleted, ignore_errors=True)


def remove_leftovers(directory: Path, names: str) -> None:
    """Remove the remains of checkpoints whose writing or removal was interrupted.

    Args:
      directory: The directory of the checkpoints.
      names: A regular expression for the names of the checkpoints.
    """
    pattern = re.compile(rf"(?:{names})({re.escape(_WRITING)}.*|{re.escape(_DELETED)})")
    for path in _entries(directory):
        matched = pattern.fullmatch(path.name)
        if matched and matched[1] == _DELETED:
            shutil.rmtree(path, ignore_errors=True)
        elif matched:
            # Another user may have left it, or may have given something such a name.
            suppressed = contextlib.suppress(PermissionError, NotADirectoryError)
            with suppressed, _locked(path) as locked:
                if locked or (locked is None and _is_old(path)):
                    shutil.rmtree(path, ignore_errors=True)


def complete_replacement(path: Path) -> None:
    """Give a checkpoint its name if its writer was killed after it had moved the old one aside."""
    pattern = f"{glob.escape(path.name + _WRITING)}*/{_REPLACED}"
    for _ in range(_REPLACEMENT_LOOKS):
        replaced = None if is_there(path) else next(path.parent.glob(pattern), None)
        if replaced is None:
            return
        with _locked(replaced.parent) as locked:
            if locked or (locked is None and _is_old(replaced.parent)):
                with contextlib.suppress(OSError):  # another process was quicker
                    (replaced.parent / _WRITTEN).rename(path)
                return
        time.sleep(0.01)  # its writer is between the two renames


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > _OLD_SECONDS


def _require_checkpoint(path: Path) -> None:
    if not is_there(path):
        raise CheckpointNotFound(
            f"There is no checkpoint {path}. {_neighbours(path)} Give the path that `save` "
            "returned."
        )
    if is_reserved(path.name):
        raise InvalidCheckpoint(unusable(path, "writing it, or removing it, was cut off"))
    if not is_checkpoint(path):
        what = "it is a file" if path.is_file() else "it has no manifest"
        raise InvalidCheckpoint(unusable(path, f"{what}, so it is not one that replicax wrote"))


def _require_plain(path: Path) -> None:
    """Refuse a checkpoint with anything but files: reading a FIFO would wait for its writer."""
    seen, directories = set(), [path]
    while directories:
        for each in directories.pop().iterdir():
            found = _status(each)
            if found is None:  # a dangling link, or removed: reading fails if it is needed
                continue
            if not stat.S_ISDIR(found.st_mode) and not stat.S_ISREG(found.st_mode):
                raise Unusable(f"{each.relative_to(path)} in it is no file")
            if stat.S_ISDIR(found.st_mode) and (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))  # links may form cycles
                directories.append(each)


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f"Nor is there a directory {path.parent}."
    names = sorted(each.name for each in _entries(path.parent) if each.is_dir())
    return f"In {path.parent} there is {', '.join(names[:10]) or 'no directory'}."


def _failure(path: Path, what: str, error: Exception) -> CheckpointError:
    refused = system_error(error)
    # Orbax itself raises an error of this kind without a number when a file is missing.
    damaged = (None, *_NOTHING_THERE, errno.EISDIR)
    if refused is not None and refused.errno not in damaged:
        return CheckpointError(_forbidden(path, refused))
    return InvalidCheckpoint(unusable(path, f"{what} cannot be read: {reason(error)}"))


def _forbidden(path: Path, error: OSError) -> str:
    return (
        f"{path} cannot be read: {reason(error)}. Give this process the right to read it, or "
        "remove what stands in the way; nothing has been changed."
    )


def unusable(path: Path, problem: str) -> str:
    """Return the message about a checkpoint that cannot be restored."""
    return (
        f"{path} cannot be restored: {problem}. Give the path of a checkpoint that `rx.Checkpoint` "
        "has saved; nothing has been changed."
    )
