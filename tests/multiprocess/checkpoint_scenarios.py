"""The checkpoint scenarios of test_checkpoint.py, run by one pair of processes.

Called with a directory that both see, in which there is a checkpoint of a process alone.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from small_training import Training
from workers import message_of

import replicax as rx
from replicax.checkpoint import _files as files


def going_on(strategy, directory):
    """Saved by two workers in the middle of the second epoch; the test goes on from there too."""
    training = Training(strategy, compiled=True)
    with rx.CheckpointManager(
        training.checkpoint, directory / "shared", max_to_keep=1, asynchronous=True
    ) as manager:
        training.steps(2)
        manager.save()
        training.steps(2)
        path = manager.save()
        latest = manager.latest_checkpoint  # waited for, on both
        training.steps(4)
    expected = training.state()
    again = Training(strategy, compiled=True)
    manager = rx.CheckpointManager(again.checkpoint, directory / "shared")
    restored = manager.restore_or_initialize()
    again.steps(4)
    return {
        "same path": restored == path == latest,
        "kept": [Path(each).name for each in manager.checkpoints],
        "expected": expected,
        "again": again.state(),
    }


def from_one_process(strategy, directory):
    training = Training(strategy, compiled=True)
    training.checkpoint.restore(directory / "alone" / "ckpt-1")
    training.steps(4)
    return training.state()


def paths_of_their_own(strategy, directory, worker):
    """Save as in TensorFlow's tutorials: all workers save, and the first one's files are kept."""
    checkpoint = rx.Checkpoint(value=rx.Variable(7.0), wide=np.arange(4) + 2**40, step=1)
    own = directory if worker == 0 else Path(tempfile.mkdtemp())
    path = checkpoint.save(own / "own")
    seen = []
    for each in (path, directory / "own-1"):
        checkpoint.value.assign(0.0)
        checkpoint.wide, checkpoint.step = np.zeros(4, np.int64), 0
        checkpoint.restore(each).assert_consumed()
        seen.append([float(checkpoint.value), checkpoint.wide.tolist(), checkpoint.step])
    if worker != 0:
        shutil.rmtree(own)
    return {"seen": seen, "name": Path(path).name}


def as_in_the_tutorials(strategy, directory, worker):
    """All save by managers, the first where it counts, and the others remove what they have saved.

    Twice, as by a program that is started again.
    """
    place = directory / "tutorial"
    own = place if worker == 0 else place / f"workertemp_{worker}"
    seen = []
    for _ in range(2):
        with strategy.scope():
            weight = rx.Variable([0.0, 0.0])
            epoch = rx.Variable(0)
        checkpoint = rx.Checkpoint(weight=weight, epoch=epoch)
        latest = rx.latest_checkpoint(place)
        seen.append(latest and Path(latest).name)
        checkpoint.restore(latest)
        manager = rx.CheckpointManager(checkpoint, own, max_to_keep=1)
        for _ in range(2):
            strategy.run(lambda: None)
            epoch.assign_add(1)
            weight.assign_add([1.0, 2.0])
            manager.save()
            if worker != 0:
                shutil.rmtree(own)
    return [*seen, weight.numpy().tolist()]


def later(strategy, directory):
    """Attributes that are set after the restore; and a path without a number."""
    with strategy.scope():
        weight, other = rx.Variable([1.0, 2.0]), rx.Variable([0.0, 0.0])
    path = rx.Checkpoint(weight=weight, n=3).write(directory / "exact")
    again = rx.Checkpoint(weight=weight, n=4).write(directory / "exact")
    checkpoint = rx.Checkpoint()
    report = checkpoint.read(path)
    unused = report.unused
    checkpoint.weight = other
    checkpoint.n = 0
    report.assert_consumed()
    return [path == again, unused, other.numpy().tolist(), checkpoint.n]


def while_it_is_written(strategy, directory):
    """Restored before it is complete; the other worker has no thread to wait for."""
    with strategy.scope():
        weight = rx.Variable(np.arange(300_000.0, dtype=np.float32))
    checkpoint = rx.Checkpoint(weight=weight, n=1)
    manager = rx.CheckpointManager(checkpoint, directory / "pending", asynchronous=True)
    path = manager.save()
    weight.assign_add(np.ones(300_000, np.float32))
    checkpoint.n = 2
    checkpoint.restore(path).assert_consumed()
    manager.save()
    checkpoint.sync()
    last = rx.latest_checkpoint(directory / "pending")
    return [checkpoint.n, float(weight.numpy()[-1]), last and Path(last).name]


def nothing_for_one(strategy, directory, worker):
    """One of them has found no checkpoint; and then both have not."""
    checkpoint = rx.Checkpoint(n=1)
    path = checkpoint.save(directory / "half")
    told = message_of(
        rx.errors.CheckpointMismatch, lambda: checkpoint.restore(path if worker == 0 else None)
    )
    return [told, checkpoint.restore(None).path]


def positions_of_their_own(strategy, directory):
    """Each worker reads other data, and is at another place of it."""

    def dataset_fn(context):
        rows = 3 + 2 * context.input_pipeline_id
        return [np.float32([i + 100 * context.input_pipeline_id]) for i in range(rows)]

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    iterator = iter(dataset)
    for _ in range(4):
        next(iterator)
    path = rx.Checkpoint(data=iterator).save(directory / "positions")
    iterator.close()
    other = rx.Checkpoint(data=iter(dataset))
    other.restore(path)
    alike = iter(strategy.experimental_distribute_dataset([np.float32([0.0, 1.0])]))
    refused = message_of(
        rx.errors.CheckpointMismatch, lambda: rx.Checkpoint(data=alike).restore(path)
    )
    alike.close()
    rest = [np.asarray(strategy.gather(element, axis=0)).tolist() for element in other.data]
    return {"rest": rest, "refused": refused}


def arrays_over_both(strategy, directory):
    """An array of which each worker has a half."""
    sharding = NamedSharding(strategy.topology.mesh, PartitionSpec("replica"))
    whole = np.arange(8, dtype=np.float32)

    def make(factor):
        return jax.make_array_from_callback((8,), sharding, lambda index: factor * whole[index])

    path = rx.Checkpoint(array=make(1)).save(directory / "divided")
    checkpoint = rx.Checkpoint(array=make(0))
    checkpoint.restore(path)
    assert checkpoint.array.sharding == sharding
    return np.asarray(checkpoint.array.addressable_data(0)).tolist()


def contents_that_differ(strategy, directory, worker):
    checkpoint = rx.Checkpoint(value=np.zeros(2 + worker))
    return message_of(
        rx.errors.CollectiveMismatch, lambda: checkpoint.save(directory / "different")
    )


def one_cannot_write(strategy, directory, worker):
    """In the background, both are told by their next call; otherwise by the same one."""
    write = files.write

    def fail(*args):
        raise OSError("the disk is full")

    files.write = fail
    checkpoint = rx.Checkpoint(steps=1)
    manager = rx.CheckpointManager(checkpoint, directory / "full", asynchronous=True)
    manager.save()
    told = message_of(rx.errors.SaveFailed, manager.save)
    at_once = message_of(rx.errors.SaveFailed, lambda: checkpoint.save(directory / "full" / "a"))
    files.write = write
    manager.save()
    manager.close()
    return {
        "told": told,
        "at once": at_once,
        "afterwards": [Path(path).name for path in manager.checkpoints],
    }


def one_cannot_read(strategy, directory, worker):
    with strategy.scope():
        value = rx.Variable(5.0)
    checkpoint = rx.Checkpoint(value=value)
    path = Path(checkpoint.save(directory / "unread"))
    value.assign(6.0)
    kind = rx.errors.CheckpointNotFound if worker == 1 else rx.errors.CheckpointError
    wrong = path if worker == 0 else path / "elsewhere"
    message = message_of(kind, lambda: checkpoint.restore(wrong))
    return {"message": message, "value": float(value.numpy())}


def main(directory: Path) -> None:
    strategy = rx.MultiWorkerMirroredStrategy()
    worker = strategy.cluster_resolver.task_id
    results = {
        "going on": going_on(strategy, directory),
        "from one process": from_one_process(strategy, directory),
        "own paths": paths_of_their_own(strategy, directory, worker),
        "tutorials": as_in_the_tutorials(strategy, directory, worker),
        "later": later(strategy, directory),
        "pending": while_it_is_written(strategy, directory),
        "nothing for one": nothing_for_one(strategy, directory, worker),
        "own positions": positions_of_their_own(strategy, directory),
        "divided": arrays_over_both(strategy, directory),
        "different": contents_that_differ(strategy, directory, worker),
        "unwritten": one_cannot_write(strategy, directory, worker),
        "unread": one_cannot_read(strategy, directory, worker),
    }
    print("RESULTS", json.dumps(results), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
