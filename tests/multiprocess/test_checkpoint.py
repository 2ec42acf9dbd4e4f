"""Two workers save and restore together; processes of other sizes resume from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import cpus
from small_training import Training
from workers import run

import replicax as rx

Results = tuple[Path, dict[str, Any], list[dict[str, Any]]]


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    directory = tmp_path_factory.mktemp("checkpoints")
    training = Training(rx.MirroredStrategy(cpus(1)), compiled=True)
    training.steps(4)
    with rx.CheckpointManager(training.checkpoint, directory / "alone") as manager:
        manager.save()
    training.steps(4)
    training.iterator.close()
    ended = run(["tests/multiprocess/checkpoint_scenarios.py", str(directory)], 100)
    for each in ended:
        assert each.code == 0, each.output
    told = [
        json.loads(line.removeprefix("RESULTS "))
        for each in ended
        for line in each.output.splitlines()
        if line.startswith("RESULTS ")
    ]
    return directory, training.state(), told


def both(results: Results, name: str) -> Any:
    first, second = (each[name] for each in results[2])
    assert first == second
    return first


def test_a_run_of_two_workers_goes_on_bit_by_bit(results):
    told = both(results, "going on")
    assert told["same path"]
    assert told["kept"] == ["ckpt-2"]
    assert told["again"] == told["expected"]
    assert told["expected"]["steps"] == told["expected"]["data"] == 8
    # After eight steps of four rows, of twelve: two epochs and two thirds.
    assert sum(told["expected"]["seen"]) == 32
    assert set(told["expected"]["seen"]) == {2, 3}


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_one_process_goes_on_from_what_two_workers_saved(results, replicas):
    directory, _, told = results
    training = Training(rx.MirroredStrategy(cpus(replicas)), compiled=True)
    training.checkpoint.restore(directory / "shared" / "ckpt-2")
    training.steps(4)
    same(training.state(), told[0]["going on"]["expected"])
    training.iterator.close()


def test_two_workers_go_on_from_what_one_process_saved(results):
    same(both(results, "from one process"), results[1])


def test_workers_may_save_to_paths_of_their_own(results):
    told = both(results, "own paths")
    assert told == {"seen": [[7.0, [2**40 + i for i in range(4)], 1]] * 2, "name": "own-1"}


def test_workers_save_as_the_tutorials_do(results):
    assert both(results, "tutorials") == [None, "ckpt-2", [4.0, 8.0]]
    assert [path.name for path in (results[0] / "tutorial").iterdir()] == ["ckpt-4"]


def test_attributes_that_are_set_later_are_restored_on_all_workers(results):
    assert both(results, "later") == [True, ["weight", "n"], [1.0, 2.0], 4]


def test_what_is_being_written_is_waited_for_by_all_workers(results):
    assert both(results, "pending") == [1, 299_999.0, "ckpt-2"]


def test_a_checkpoint_that_only_some_have_found_is_told(results):
    told, path = both(results, "nothing for one")
    assert "Some workers have a checkpoint to restore, and worker 1 got None." in told
    assert path is None


def test_each_worker_goes_on_with_its_own_data(results):
    directory = results[0]
    told = both(results, "own positions")
    assert told["rest"] == [[104.0]]
    assert "that read data of their own, and is for 2 that read the same data" in told["refused"]
    one = rx.MirroredStrategy(cpus(1))
    dataset = one.distribute_datasets_from_function(lambda _: [np.float32([0.0])] * 8)
    checkpoint = rx.Checkpoint(data=iter(dataset))
    with pytest.raises(rx.errors.CheckpointMismatch, match=r"by 2 worker\(s\).*out among 1"):
        checkpoint.restore(directory / "positions-1")
    checkpoint.data.close()


def test_arrays_that_are_divided_over_the_workers(results):
    directory, _, told = results
    assert [each["divided"] for each in told] == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    checkpoint = rx.Checkpoint(array=np.zeros(8, np.float32))
    checkpoint.restore(directory / "divided-1")
    assert checkpoint.array.tolist() == list(range(8))


def test_workers_with_different_objects_are_told(results):
    message = both(results, "different")
    assert "worker 0 has value: float64[2]; worker 1 has value: float64[3]" in message


def test_what_one_cannot_write_all_are_told(results):
    told = both(results, "unwritten")
    assert "worker 0 could not write the checkpoint" in told["told"]
    assert "OSError: the disk is full" in told["told"]
    assert told["told"].partition(": OSError")[2] == told["at once"].partition(": OSError")[2]
    assert told["afterwards"] == ["ckpt-3"]


def test_what_one_cannot_read_nobody_restores(results):
    first, second = (each["unread"] for each in results[2])
    assert first["value"] == second["value"] == 6.0
    assert "worker 1 could not restore" in first["message"]
    assert "There is no checkpoint" in first["message"]
    assert "There is no checkpoint" in second["message"]
