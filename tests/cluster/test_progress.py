"""A worker's report of its own progress."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import grain
import numpy as np
import pytest
from pipelines import Rows

from replicax.cluster import Progress
from replicax.input._element_supply import WatchedSupply
from replicax.input._feed import SplittingFeed
from replicax.input._prefetch import PrefetchedProducer, Prefetcher, Producer
from replicax.input._row_splitting import Workers
from replicax.input.sources import source_of


class Blocked:
    """A disk that does not answer until it is told to."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def read_row(self, row: Any) -> Any:
        self.answers.wait(20)
        return row

    def generator(self) -> Any:
        yield self.read_row(np.zeros(1))


def reported(progress: Progress) -> list[str]:
    """Return a worker's progress, once its input is blocked."""
    deadline = time.monotonic() + 10
    while "read_row" not in "".join(where := progress.report().where):
        assert time.monotonic() < deadline, where
        time.sleep(0.01)
    return where


@pytest.mark.parametrize("kind", ["generator", "generator, another thread", "threads of Grain"])
def test_a_worker_that_waits_for_its_input_stands_there(kind):
    disk, progress = Blocked(), Progress()
    dataset: Any = disk.generator
    if kind == "threads of Grain":
        dataset = grain.MapDataset.source(Rows(np.zeros(1))).map(disk.read_row).batch(1)

    def begin() -> Producer:
        return SplittingFeed(source_of(dataset), Workers(1, (0,)), False)

    if kind == "generator, another thread":
        reader = PrefetchedProducer(begin, lambda step: step)
        ahead = Prefetcher(lambda: reader, lambda step: (step, {}), 1, reader.steps)
    else:
        ahead = Prefetcher(begin, lambda step: (step, {}), 1)
    elements = WatchedSupply(ahead, mock.Mock(progress=progress))
    waiting = threading.Thread(target=elements.take)
    waiting.start()
    where = reported(progress)
    assert where[0].startswith(__file__)
    assert where[0].endswith("in Blocked.read_row (reading its input)")
    assert "reading its input" not in where[-1], "where the program stands comes behind it"
    with progress.for_input("a step"):  # it has its own, and waits for that of others
        assert "read_row" not in "".join(progress.report().where)
    disk.answers.set()
    waiting.join(10)
    assert "reading" not in "".join(progress.report().where)
    elements.close()


@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="it links a virtual environment")
def test_a_library_is_known_by_either_name_of_a_linked_environment(tmp_path):
    (tmp_path / "linked").symlink_to(sys.prefix)
    script = """
        import numpy, pathlib
        from replicax.cluster import is_users
        path = pathlib.Path(numpy.__file__)
        print(is_users(str(path)), is_users(str(path.resolve())), is_users("train.py"))
    """
    done = subprocess.run(
        [f"{tmp_path}/linked/bin/python", "-c", "if True:" + script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.stdout, done.returncode) == ("False False True\n", 0), done.stderr
