"""Workers that have a part of the state each: what they save, restore and sum."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from conftest import cpus
from divided_training import by_rows, make, numbers, trained
from workers import run

import replicax as rx


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("divided")
    alone = trained(rx.FullyShardedStrategy(cpus(3), variable_partitioner=by_rows))
    alone.save(directory / "alone")
    ended = run(["tests/multiprocess/divided_checkpoints.py", str(directory)], 120, devices=2)
    for each in ended:
        assert each.code == 0, each.output[-5000:]
    lines = [line for each in ended for line in each.output.splitlines()]
    told = [json.loads(line[8:]) for line in lines if line.startswith("RESULTS ")]
    return directory, numbers(alone), told


def both(results, name):
    first, second = (each[name] for each in results[2])
    assert first == second
    return first


def test_each_worker_saves_its_part(results):
    told = both(results, "restored")
    assert told["files"] == ["arrays", "manifest", "parts-0", "parts-1"]
    assert told["again"] == told["expected"]
    assert told["fresh"] == told["expected"]


@pytest.mark.parametrize("kind", ["mirrored", "sharded", "sharded by columns"])
def test_one_process_goes_on_from_parts(results, kind):
    directory, _, told = results
    partitioner = (lambda *_: [1, 2]) if kind == "sharded by columns" else by_rows
    strategy = (
        rx.MirroredStrategy(cpus(2))
        if kind == "mirrored"
        else rx.FullyShardedStrategy(cpus(3), variable_partitioner=partitioner)
    )
    checkpoint = make(strategy)
    checkpoint.restore(directory / "divided-1")
    assert checkpoint.weight.numpy().tolist() == told[0]["restored"]["mirrored"]
    trained(strategy, checkpoint)
    for ours, theirs in zip(numbers(checkpoint), told[0]["restored"]["expected"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_workers_go_on_from_what_one_process_saved(results):
    assert both(results, "from one process") == results[1]


def test_a_worker_with_a_path_of_its_own_saves_everything(results):
    assert both(results, "own paths") == [True, []]


def test_a_part_that_cannot_be_written_fails_the_save(results):
    told = both(results, "unwritten")
    assert "worker 0 could not write the checkpoint /full-2: SaveFailed: worker 1" in told["told"]
    assert "OSError: the disk is full" in told["told"]
    assert told["left"] == ["full-1", "full-3"]


def test_no_worker_holds_the_whole_state_to_save_or_restore_it(results):
    for each in results[2]:
        saving, restoring = each["peak"]
        assert 0.5 <= saving < 0.9
        assert 0.5 <= restoring < 0.9


def test_a_damaged_part_is_refused(results, tmp_path):
    directory = results[0]
    checkpoint = make(rx.MirroredStrategy(cpus(1)))
    before = checkpoint.weight.numpy().tolist()
    for damage, message in (("missing", "parts-1 in it is missing"), ("other", "of another save")):
        path = tmp_path / damage
        shutil.copytree(directory / "divided-1", path)
        shutil.rmtree(path / "parts-1")
        if damage == "other":
            shutil.copytree(directory / "full-1" / "parts-1", path / "parts-1")
        with pytest.raises(rx.errors.InvalidCheckpoint, match=message):
            checkpoint.restore(path)
    assert checkpoint.weight.numpy().tolist() == before


def test_a_variable_is_shown_without_the_other_workers(results):
    assert both(results, "repr").endswith("dtype=float32, divided over the workers>")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_parts_of_sums_are_exact(workers):
    """Not by reduce-scatters, which are sometimes wrong between processes on CPUs (jax 40830)."""
    for each in run(["tests/multiprocess/scattered_sums.py", "10"], 240, workers=workers):
        assert each.code == 0, each.output[-3000:]
        assert "10 rounds agree" in each.output
