"""Checkpoints on disk: directories that are complete or not there, written and read by Orbax."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from replicax.checkpoint._manifest import Manifest, Unusable, checksum_of
from replicax.errors import CheckpointNotFound, InvalidCheckpoint

# Orbax writes a directory of this name, and gives it its own when it is complete.
_TEMPORARY = ".orbax-checkpoint-tmp"
_DELETED = ".deleted"
_MANIFEST, _ARRAYS = "manifest", "arrays"


def load() -> None:
    """Imports Orbax, which takes 0.5 s, and is not possible any more when a program ends."""
    import orbax.checkpoint  # noqa: F401  here, because importing replicax should not take that


def write(path: Path, arrays: Mapping[str, np.ndarray], manifest: Manifest) -> None:
    """Writes a checkpoint that is not there at all until it is there as a whole."""
    import orbax.checkpoint as ocp

    manifest = manifest.with_checksums(arrays)
    items: dict[str, Any] = {_MANIFEST: ocp.args.JsonSave(manifest.to_json())}
    # It refuses arrays without elements, of which the manifest says all there is.
    with_elements = {key: array for key, array in arrays.items() if array.size}
    # 64 bits stay 64 bits, also where they become arrays of JAX for a moment.
    with _checkpointer() as checkpointer, jax.enable_x64(True):
        if with_elements:
            items[_ARRAYS] = ocp.args.PyTreeSave(_writable(with_elements))
        checkpointer.save(path, ocp.args.Composite(**items))


def read_manifest(path: Path) -> Manifest:
    """What a checkpoint says of itself."""
    import orbax.checkpoint as ocp

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
    """Some of its arrays, as the program had them."""
    import orbax.checkpoint as ocp

    facts = {key: manifest.arrays[key] for key in keys}
    read: dict[str, Any] = {
        key: np.zeros(each.shape, jax.numpy.dtype(each.dtype))
        for key, each in facts.items()
        if each.keys is None and 0 in each.shape
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
    """The complete checkpoints `name-1`, `name-2` and so on in a directory, by number."""
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    found = {}
    for path in directory.glob("*"):
        matched = pattern.fullmatch(path.name)
        if matched and (path / _MANIFEST).is_dir():
            found[int(matched[1])] = path
    return dict(sorted(found.items()))


def remove(path: Path) -> None:
    """Takes a checkpoint away; one whose removal is cut off does not look like one any more."""
    deleted = path.with_name(path.name + _DELETED)
    path.rename(deleted)
    shutil.rmtree(deleted, ignore_errors=True)


def remove_leftovers(directory: Path, name: str) -> None:
    """Takes away what was left of checkpoints when writing or removing them was cut off."""
    pattern = re.compile(rf"{re.escape(name)}-\d+({re.escape(_TEMPORARY)}.*|{re.escape(_DELETED)})")
    for path in directory.glob("*"):
        if pattern.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _checkpointer() -> Any:
    """Orbax for this process alone: who writes and who waits is agreed on elsewhere."""
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
            composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
        ),
        multiprocessing_options=alone,
    )


def _writable(arrays: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
    """Arrays as this process's Orbax writes them.

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
    if _TEMPORARY in path.name or path.name.endswith(_DELETED):
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
