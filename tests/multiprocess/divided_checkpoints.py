"""The checkpoint scenarios of test_fully_sharded.py, run by two workers with two devices each.

Called with a directory that both see, in which there is a checkpoint of a process alone.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
from divided_training import SHAPE, by_rows, make, numbers, trained
from workers import message_of

import replicax as rx
from replicax.checkpoint import _files as files


def saved_and_restored(strategy, directory):
    """Saved in parts, and restored in the same and in another layout; both go on alike."""
    checkpoint = trained(strategy)
    path = Path(checkpoint.save(directory / "divided"))
    expected = numbers(trained(strategy, checkpoint))
    again = trained(strategy)
    again.restore(path).assert_consumed()
    fresh = make(strategy)
    report = fresh.restore(path)
    trained(strategy, fresh)
    report.assert_consumed()
    mirrored = make(rx.MirroredStrategy())
    mirrored.restore(path)
    return {
        "files": sorted(each.name for each in path.iterdir() if each.is_dir()),
        "expected": expected,
        "again": numbers(trained(strategy, again)),
        "fresh": numbers(fresh),
        "mirrored": mirrored.weight.numpy().tolist(),
    }


def from_one_process(strategy, directory):
    checkpoint = trained(strategy)
    checkpoint.restore(directory / "alone-1").assert_consumed()
    return numbers(checkpoint)


def paths_of_their_own(strategy, directory, worker):
    """Each writes all of it, where others cannot read its part."""
    checkpoint = trained(strategy)
    own = directory if worker == 0 else Path(tempfile.mkdtemp())
    path = Path(checkpoint.write(own / "own"))
    before = checkpoint.weight.numpy().tolist()
    checkpoint.weight.assign(np.zeros(SHAPE, np.float32))
    checkpoint.read(path)
    parts = [each.name for each in path.iterdir() if each.name.startswith("parts")]
    return [checkpoint.weight.numpy().tolist() == before, parts]


def one_cannot_write(strategy, directory, worker):
    """The worker that does not give the checkpoint its name cannot write its part."""
    write_into = files.write_into

    def fail(*args):
        raise OSError("the disk is full")

    checkpoint = make(strategy)
    checkpoint.save(directory / "full")
    if worker == 1:
        files.write_into = fail
    told = message_of(rx.errors.SaveFailed, lambda: checkpoint.save(directory / "full"))
    files.write_into = write_into
    checkpoint.save(directory / "full")
    left = sorted(each.name for each in directory.glob("full*"))
    return {"told": told.replace(str(directory), ""), "left": left}


def peak(strategy, directory):
    """Return the most memory that a save and a restore take, as a fraction of the state."""
    with strategy.scope():
        weights = [rx.Variable(np.ones((64, 16 * 1024), np.float32)) for _ in range(8)]
    state = sum(weight.shape[0] * weight.shape[1] * 4 for weight in weights)
    checkpoint = rx.Checkpoint(weights=weights)
    checkpoint.save(directory / "small")
    fractions = []
    for action in (checkpoint.write, checkpoint.read):
        tracemalloc.start()
        action(directory / "large")
        fractions.append(tracemalloc.get_traced_memory()[1] / state)
        tracemalloc.stop()
    return fractions


def main(directory: Path) -> None:
    strategy = rx.MultiWorkerFullyShardedStrategy(variable_partitioner=by_rows)
    worker = strategy.cluster_resolver.task_id
    results = {
        "restored": saved_and_restored(strategy, directory),
        "from one process": from_one_process(strategy, directory),
        "own paths": paths_of_their_own(strategy, directory, worker),
        "unwritten": one_cannot_write(strategy, directory, worker),
        "peak": peak(strategy, directory),
        "repr": repr(make(strategy).weight),
    }
    print("RESULTS", json.dumps(results), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
