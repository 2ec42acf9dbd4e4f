"""Several workers share a dataset: every row reaches exactly one of them.

The workers are made up: what each of them would read is read here, one after another.
"""

from __future__ import annotations

import contextlib
import json
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import grain
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import example, given
from hypothesis import strategies as st
from pipelines import RULES, Rows, expected_shares

import replicax as rx
from replicax.input._agreement import AgreeingFeed, InTurn, OfferingFeed
from replicax.input._ending import EndOfData
from replicax.input._feed import Feed, SplittingFeed
from replicax.input._row_splitting import Workers, shares
from replicax.input._sharding import shard
from replicax.input.sources import source_of

POLICIES = rx.AutoShardPolicy


def workers_of(count: int, replicas_each: int, rule: str = "even") -> list[Workers]:
    total = count * replicas_each
    partial_batches = rx.InputOptions(partial_batches=rule).partial_batches
    return [
        Workers(
            total,
            tuple(range(i * replicas_each, (i + 1) * replicas_each)),
            count,
            i,
            partial_batches,
        )
        for i in range(count)
    ]


def steps_of(feed: SplittingFeed) -> list[list[list[Any]]]:
    """Return every local replica's rows for every step."""
    steps = []
    while True:
        try:
            step = feed.step()
        except EndOfData:
            feed.close()
            return steps
        steps.append([rows.tolist() for rows in step.columns()[0]])


def read(dataset: Any, workers: Workers, policy: rx.AutoShardPolicy) -> list[list[list[Any]]]:
    source, own = shard(source_of(dataset), workers, policy)
    return steps_of(SplittingFeed(source, workers, own))


def read_by_all(
    dataset: Any, count: int, replicas_each: int, policy: rx.AutoShardPolicy, rule: str = "even"
) -> list[list[list[list[Any]]]]:
    return [read(dataset, workers, policy) for workers in workers_of(count, replicas_each, rule)]


def rows_in(steps: Any) -> Counter[Any]:
    return Counter(np.concatenate([[], *(rows for step in steps for rows in step)]).tolist())


@given(
    data=st.data(),
    count=st.integers(1, 4),
    each=st.integers(1, 3),
    batch=st.integers(1, 7),
    rule=st.sampled_from(RULES),
)
def test_every_row_is_read_once(data, count, each, batch, rule):
    size = data.draw(st.integers(0, 2 * count * each * batch + 1), "size")
    rows = Counter(range(size))
    dataset = rx.from_tensor_slices(np.arange(size)).batch(batch)
    (alone,) = workers_of(1, count * each, rule)
    whole = read(dataset, alone, POLICIES.DATA)
    assert whole == expected_shares(range(size), batch, count * each, rule)
    for policy in (POLICIES.DATA, POLICIES.AUTO):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = read_by_all(dataset, count, each, policy, rule)
        assert sum((rows_in(part) for part in parts), Counter()) == rows
        # Side by side, the workers' replicas have what the replicas of one worker would have.
        assert [list(chain.from_iterable(step)) for step in zip(*parts, strict=True)] == whole
    for part in read_by_all(dataset, count, each, POLICIES.OFF, rule):
        assert rows_in(part) == rows


@given(count=st.integers(1, 4), files=st.lists(st.integers(0, 9), min_size=4, max_size=6))
def test_every_row_of_files_is_read_once(count, files, tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    paths, first = [], 0
    for number, size in enumerate(size for size in files if size):
        paths.append(f"{directory}/{number}.parquet")
        column = pyarrow.array(range(first, first + size))
        pyarrow.parquet.write_table(pyarrow.table({"row": column}), paths[-1])
        first += size
    if len(paths) < count:
        return
    dataset = grain.experimental.ParquetIterDataset(paths).map(lambda row: int(row["row"])).batch(4)
    for policy in (POLICIES.FILE, POLICIES.AUTO):
        parts = read_by_all(dataset, count, 2, policy)  # no warning: there are files enough
        assert sum((rows_in(part) for part in parts), Counter()) == Counter(range(first))


@given(
    rows=st.integers(0, 60),
    full=st.integers(1, 30),
    count=st.integers(1, 4),
    rule=st.sampled_from(RULES),
)
@example(rows=10, full=10, count=2, rule="even")
def test_a_step_of_all_workers_has_the_rows_of_a_batch(rows, full, count, rule):
    """Batches that each worker has for itself."""
    rows = min(rows, full)
    steps = [w.cut_own(rows, full) for w in workers_of(count, 2, rule)]
    if rule == "even":
        sizes = [[b - a for a, b in step] for worker in steps for step in worker]
        assert all(max(step) - min(step) <= 1 for step in sizes)
    for bounds in steps:
        flat = [row for step in bounds for start, stop in step for row in range(start, stop)]
        assert flat == list(range(rows))
    if rows == full >= 2 * count:  # at least one for each replica
        sizes = [[sum(b - a for a, b in step) for step in worker] for worker in steps]
        assert {len(worker) for worker in sizes} == {count}
        assert {sum(step) for step in zip(*sizes, strict=True)} == {full}


def test_shares():
    assert [shares(*case) for case in [(8, 2), (6, 2), (40, 2), (10, 4), (3, 4), (0, 2)]] == [
        [4, 4],
        [3, 3],
        [20, 20],
        [3, 3, 2, 2],
        [1, 1, 1, 0],
        [0, 0],
    ]


@pytest.mark.parametrize(
    ("rule", "data", "off"),
    [
        ("even", [[[8, 9], [10, 11]], [[12], [13]]], [[[8, 9], [10, 11]], [[12], [13]]]),
        ("in_order", [[[8, 9], [10, 11]], [[12, 13], []]], [[[8, 9], [10, 11]], [[12, 13], []]]),
    ],
)
def test_workers_share_a_partial_batch(rule, data, off):
    """Two workers of two replicas; of the second batch of eight, six rows are there."""
    dataset = rx.from_tensor_slices(np.arange(14)).batch(8)
    parts = read_by_all(dataset, 2, 2, POLICIES.DATA, rule)
    assert [part[1] for part in parts] == data
    for part in read_by_all(dataset, 2, 2, POLICIES.OFF, rule):
        assert part[2:] == off


@pytest.fixture
def array_records(tmp_path):
    paths = []
    for file in range(3):
        paths.append(f"{tmp_path}/{file}.array_record")
        writer = ArrayRecordWriter(paths[-1], "group_size:1")
        for row in range(5):
            writer.write(str(5 * file + row).encode())
        writer.close()
    return paths


@pytest.mark.parametrize("as_iterable", [False, True])
def test_array_records_are_shared_without_reading_all(array_records, as_iterable):
    reads: Counter[int] = Counter()

    def parse(record: bytes) -> int:
        reads[int(record)] += 1
        return int(record)

    dataset = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(array_records))
    dataset = dataset.map(parse)
    dataset = dataset.to_iter_dataset().batch(4) if as_iterable else dataset.batch(4)
    parts = read_by_all(dataset, 3, 1, POLICIES.AUTO)
    assert sum((rows_in(part) for part in parts), Counter()) == Counter(range(15))
    assert reads == Counter(range(15)), "a row was read by more than one worker"


def test_tf_data_is_shared_by_files(tensorflow, tmp_path):
    paths = [f"{tmp_path}/{file}.tfrecord" for file in range(4)]
    for file, path in enumerate(paths):
        with tensorflow.io.TFRecordWriter(path) as writer:
            for row in range(5):
                writer.write(str(5 * file + row).encode())
    files = tensorflow.data.Dataset.from_tensor_slices(paths)
    for dataset in (
        tensorflow.data.TFRecordDataset(paths),
        files.interleave(tensorflow.data.TFRecordDataset),
    ):
        numbers = dataset.map(tensorflow.strings.to_number).batch(3)
        parts = read_by_all(numbers, 2, 2, POLICIES.AUTO)
        assert sum((rows_in(part) for part in parts), Counter()) == Counter(range(20))
        # Each file is read by one worker.
        owners = [{int(row) // 5 for row in rows_in(part)} for part in parts]
        assert not owners[0] & owners[1]
        with pytest.warns(rx.errors.PerformanceHint, match="fewer files than there are workers"):
            read_by_all(numbers, 5, 1, POLICIES.AUTO)


@pytest.mark.parametrize("policy", ["OFF", "DATA", "FILE", "AUTO"])
def test_the_own_options_of_tf_data_are_respected(tensorflow, policy):
    options = tensorflow.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        tensorflow.data.experimental.AutoShardPolicy, policy
    )
    dataset = tensorflow.data.Dataset.range(8).batch(4).with_options(options)
    if policy == "FILE":
        with pytest.raises(ValueError, match="not read from files"):
            read_by_all(dataset, 2, 1, POLICIES.AUTO)
    elif policy == "AUTO":
        with pytest.warns(rx.errors.PerformanceHint):
            read_by_all(dataset, 2, 1, POLICIES.AUTO)
    else:
        explicit = read_by_all(tensorflow.data.Dataset.range(8).batch(4), 2, 1, POLICIES[policy])
        assert read_by_all(dataset, 2, 1, POLICIES.AUTO) == explicit
    # What is asked for here comes before what the dataset says.
    assert sum(map(rows_in, read_by_all(dataset, 2, 1, POLICIES.DATA)), Counter()) == Counter(
        range(8)
    )


def test_a_policy_that_only_tf_data_has_is_refused(tensorflow):
    options = tensorflow.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tensorflow.data.experimental.AutoShardPolicy.HINT
    )
    dataset = tensorflow.data.Dataset.range(8).batch(4).with_options(options)
    with pytest.raises(ValueError, match=r"AutoShardPolicy\.HINT"):
        read_by_all(dataset, 2, 1, POLICIES.AUTO)


def test_auto_says_what_it_chose_and_what_else_there_is():
    dataset = grain.MapDataset.source(Rows(np.arange(8))).batch(4)
    with pytest.warns(rx.errors.PerformanceHint) as caught:
        read(dataset, workers_of(2, 1)[0], POLICIES.AUTO)
    (warning,) = caught
    message = str(warning.message)
    assert "by rows (AutoShardPolicy.DATA)" in message  # what
    assert "none of its sources names files" in message  # why
    assert "Every worker reads and prepares all" in message  # what it costs
    assert "rx.InputOptions" in message  # how to choose otherwise
    assert "distribute_datasets_from_function" in message


def test_file_without_enough_files_is_refused(array_records):
    dataset = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(array_records)).batch(2)
    for count, source, why in [
        (4, dataset, r"3 file\(s\), fewer than the workers"),
        (2, grain.MapDataset.range(8).batch(2), "none of its sources names files"),
        (2, [np.arange(4)], "not read from files"),
    ]:
        with pytest.raises(ValueError, match=why):
            read(source, workers_of(count, 1)[0], POLICIES.FILE)


def test_one_worker_shares_with_nobody():
    (alone,) = workers_of(1, 2)
    expected = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    for policy in POLICIES:  # and no warning, nor a complaint about files
        assert read(rx.from_tensor_slices(np.arange(8)).batch(4), alone, policy) == expected


def require_exact_resumption(dataset: Any, workers: Workers, policy: rx.AutoShardPolicy) -> None:
    """After every step, what is left is what an uninterrupted pass would give."""
    source, own = shard(source_of(dataset), workers, policy)
    whole = steps_of(SplittingFeed(source, workers, own))
    feed, state = SplittingFeed(source, workers, own), None
    for done in range(len(whole) + 1):
        assert steps_of(SplittingFeed(source, workers, own, state)) == whole[done:]
        if done < len(whole):
            state = json.loads(json.dumps(feed.step().state))
    feed.close()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", [POLICIES.OFF, POLICIES.DATA])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_resuming_after_every_step(count, policy, rule):
    """The same holds inside a batch of one worker, and where its share of it is empty."""
    for workers in [*workers_of(count, 1, rule), *workers_of(count, 2, rule)]:
        for rows in range(2 * workers.replicas + 2):
            for size in {1, 2, workers.replicas, workers.replicas + 1}:
                dataset = rx.from_tensor_slices(np.arange(rows)).batch(size)
                require_exact_resumption(dataset, workers, policy)


class Table:
    """A stand-in for the hub, in which workers, each in a thread, leave their messages."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.said: dict[str, dict[int, Any]] = defaultdict(dict)
        self.changed = threading.Condition()


class AtTable:
    """A worker's session, as far as its input needs one."""

    def __init__(self, table: Table, index: int) -> None:
        self._table = table
        self._index = index
        self.members = SimpleNamespace(
            count=table.count, names=[f"worker {index}" for index in range(table.count)]
        )

    def put_input(self, topic: str, value: Any) -> Any:
        said = self._table.said[topic]
        with self._table.changed:
            said[self._index] = json.loads(json.dumps(value))
            self._table.changed.notify_all()
        return OnTable(said, self._table.count)

    def wait_for_input(self, exchange: OnTable, closed: threading.Event) -> list[Any]:
        with self._table.changed:
            assert self._table.changed.wait_for(lambda: exchange.complete, 20)
        return [value for _, value in sorted(exchange.said.items())]


@dataclass
class OnTable:
    said: dict[int, Any]
    count: int

    @property
    def complete(self) -> bool:
        return len(self.said) == self.count

    def withdraw(self) -> None:
        pass


def read_together(
    datasets: Sequence[Any], team: Sequence[Workers], states: Sequence[Any]
) -> list[tuple[Any, Any]]:
    """Return the workers' rows and states for every step that they take together."""
    table = Table(len(team))

    def read_one(workers: Workers) -> list[tuple[Any, Any]]:
        def begin() -> Feed:
            return SplittingFeed(
                source_of(datasets[workers.index]), workers, True, states[workers.index]
            )

        session: Any = AtTable(table, workers.index)
        replicas = len(workers.local)
        offering = OfferingFeed(begin, replicas, session, "pass")
        feed = AgreeingFeed(offering, InTurn(offering), replicas, session, threading.Event())
        steps = []
        with contextlib.closing(feed), contextlib.suppress(EndOfData):
            while True:
                step = feed.step()
                rows = [part.tolist() for part in step.columns()[0]]
                steps.append((rows, json.loads(json.dumps(step.state))))
        return steps

    with ThreadPoolExecutor(len(team)) as pool:
        of_each = list(pool.map(read_one, team))
    return [tuple(zip(*step, strict=True)) for step in zip(*of_each, strict=True)]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_workers_resume_together_after_every_step(count):
    """Whatever each of them has, be it nothing at all."""
    team = workers_of(count, 1)
    for rows in range(2 * count + 2):
        for shift in range(count):
            # As files have it: one worker has some rows, the next has more, another one none.
            turns = [(index + shift) % count for index in range(count)]
            sizes = [rows * turn // max(count - 1, 1) for turn in turns]
            datasets = [
                rx.from_tensor_slices(100 * index + np.arange(size)).batch(max(1, rows))
                for index, size in enumerate(sizes)
            ]
            whole = read_together(datasets, team, [None] * count)
            seen = rows_in(chain.from_iterable(step for step, _ in whole))
            assert seen == Counter(100 * i + row for i in range(count) for row in range(sizes[i]))
            for done, (_, states) in enumerate(whole, start=1):
                assert read_together(datasets, team, states) == whole[done:]


@pytest.fixture
def parquet(tmp_path):
    def make(*sizes):
        first, paths = 0, []
        for size in sizes:
            paths.append(f"{tmp_path}/{first}-{len(sizes)}.parquet")
            column = pyarrow.array(range(first, first + size))
            pyarrow.parquet.write_table(pyarrow.table({"row": column}), paths[-1])
            first += size
        return grain.experimental.ParquetIterDataset(paths).map(lambda row: int(row["row"]))

    return make


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_resuming_after_every_step_of_files(count, parquet):
    for batch in (1, count, count + 1):
        dataset = parquet(1, 0, 2 * count + 1, 2).batch(batch)
        for workers in workers_of(count, 1):
            require_exact_resumption(dataset, workers, POLICIES.FILE)


def test_datasets_that_are_joined_are_not_shared_by_files(parquet):
    pairs = grain.experimental.ZipIterDataset(
        [parquet(7, 3, 5), grain.MapDataset.range(15).to_iter_dataset()]
    )
    dataset = pairs.map(lambda pair: 100 * pair[0] + pair[1]).batch(4)
    whole = rows_in(read(dataset, workers_of(1, 1)[0], POLICIES.AUTO))
    with pytest.warns(rx.errors.PerformanceHint, match="joins several datasets"):
        parts = read_by_all(dataset, 2, 1, POLICIES.AUTO)
    assert sum(map(rows_in, parts), Counter()) == whole


def test_a_dataset_that_cannot_be_copied_is_shared_by_rows(parquet):
    class Parse:
        def __init__(self):
            self._lock = threading.Lock()

        def __call__(self, row):
            with self._lock:
                return row

    dataset = parquet(4, 4).map(Parse()).batch(4)
    with pytest.warns(rx.errors.PerformanceHint, match="cannot be copied"):
        parts = read_by_all(dataset, 2, 1, POLICIES.AUTO)
    assert sum(map(rows_in, parts), Counter()) == Counter(range(8))


@pytest.mark.parametrize(
    ("rule", "rest_of_batch"), [("even", [[4, 5], [6, 7]]), ("in_order", [[4, 5, 6, 7], []])]
)
def test_a_state_inside_of_a_batch_fits_other_workers(rule, rest_of_batch):
    dataset = rx.from_tensor_slices(np.arange(16)).batch(8)
    first, _ = workers_of(2, 1, rule)
    state = SplittingFeed(source_of(dataset), first, True).step().state
    (alone,) = workers_of(1, 2, rule)
    rest = steps_of(SplittingFeed(source_of(dataset), alone, False, state))
    assert rest == [rest_of_batch, [[8, 9, 10, 11], [12, 13, 14, 15]]]


def test_replicas_of_a_worker_need_not_be_neighbours():
    for rows in range(9):
        for workers in (Workers(4, (1, 3), 2, 1), Workers(4, (0, 2), 2, 0)):
            steps = workers.cut_own(rows, max(rows, 1))
            flat = [row for step in steps for start, stop in step for row in range(start, stop)]
            assert flat == list(range(rows))
