"""The result of `rx.from_tensor_slices`: the methods of Grain, and those of `tf.data`."""

from __future__ import annotations

import grain
import numpy as np
import pytest
from pipelines import shares_of

import replicax as rx

NUMBERS = np.arange(10, dtype=np.int32)


def numbers(count: int = 10):
    return rx.from_tensor_slices(np.arange(count, dtype=np.int32))


def listed(dataset):
    return [np.asarray(element).tolist() for element in dataset]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda ds: ds.take(3), [0, 1, 2]),
        (lambda ds: ds.take(0), []),
        (lambda ds: ds.take(-1), list(range(10))),
        (lambda ds: ds.take(99), list(range(10))),
        (lambda ds: ds.skip(7), [7, 8, 9]),
        (lambda ds: ds.skip(-1), []),
        (lambda ds: ds.skip(99), []),
        (lambda ds: ds.shard(3, 1), [1, 4, 7]),
        (lambda ds: ds.shard(3, 0).skip(1).take(2), [3, 6]),
        (lambda ds: ds.take(2).repeat(2), [0, 1, 0, 1]),
        (lambda ds: ds.repeat().skip(9).take(3), [9, 0, 1]),
        (lambda ds: ds.map(lambda x: x * 10).skip(8), [80, 90]),
        (lambda ds: ds.batch(4).skip(1), [[4, 5, 6, 7], [8, 9]]),
        (lambda ds: ds.batch(4).shard(2, 1), [[4, 5, 6, 7]]),
        (lambda ds: ds.take(5).batch(2, drop_remainder=True), [[0, 1], [2, 3]]),
        (lambda ds: ds.enumerate(5).take(2), [[5, 0], [6, 1]]),
        (lambda ds: ds.skip(8).enumerate().repeat(2), [[0, 8], [1, 9]] * 2),
        (lambda ds: ds.skip(8).repeat(2).enumerate(), [[0, 8], [1, 9], [2, 8], [3, 9]]),
        (lambda ds: ds.zip(numbers(2)), [[0, 0], [1, 1]]),
        (lambda ds: ds.take(2).zip(ds, ds.skip(5)), [[0, 0, 5], [1, 1, 6]]),
        (lambda ds: ds.take(2).zip(grain.MapDataset.range(3, 9)).repeat(2), [[0, 3], [1, 4]] * 2),
        (lambda ds: ds.prefetch(2).take(1).prefetch(), [0]),
        (lambda ds: ds[2:8:3].cache().map(lambda x: -x), [-2, -5]),
        (lambda ds: ds.apply([grain.transforms.Batch(5)]).take(1), [[0, 1, 2, 3, 4]]),
        (lambda ds: ds.map_with_index(lambda i, x: i + x).take(3), [0, 2, 4]),
        (lambda ds: ds.skip(2).filter(lambda x: x % 3 == 0), [3, 6, 9]),
        (lambda ds: ds.take(2).pipe(lambda ds: ds.map(lambda x: x + 1)), [1, 2]),
        (lambda ds: ds.take(2).to_iter_dataset().map(lambda x: x + 1), [1, 2]),
    ],
)
def test_the_methods(make, expected):
    dataset = make(numbers())
    assert listed(dataset) == expected
    assert listed(dataset) == expected  # and again
    if not isinstance(dataset, grain.IterDataset):
        assert isinstance(dataset, grain.MapDataset)
        assert hasattr(dataset, "take"), "the methods are there behind every step"


def test_what_grain_does_is_what_grain_does():
    def steps(dataset):
        dataset = dataset.seed(7).map(lambda x: x + 1).shuffle()
        dataset = dataset.random_map(lambda x, rng: x + rng.integers(100)).repeat(2)
        return listed(dataset.batch(4))

    assert steps(numbers()) == steps(grain.MapDataset.source(NUMBERS))
    assert listed(grain.MapDataset.concatenate([numbers(2), numbers(1)])) == [0, 1, 0]
    assert listed(grain.MapDataset.mix([numbers(2), numbers(2)])) == [0, 0, 1, 1]


def test_shuffle():
    shuffled = numbers().shuffle(seed=3)
    first, second = np.reshape(listed(shuffled.repeat(2)), (2, 10)).tolist()
    assert listed(shuffled) == first != second
    assert sorted(first) == sorted(second) == NUMBERS.tolist()
    assert listed(shuffled.batch(5)) == np.reshape(first, (2, 5)).tolist()
    mapped = numbers().map(lambda x: x + 1)
    for dataset in (numbers(), mapped, mapped.batch(2), numbers().take(5)):
        for arguments in ((1000,), (1000, 3)):
            with pytest.raises(
                ValueError, match=r"got buffer_size=1000 .*`shuffle\(seed=\.\.\.\)`"
            ):
                dataset.shuffle(*arguments)
        with pytest.raises(ValueError, match="got buffer_size=10, reshuffle_each_iteration=False"):
            dataset.shuffle(buffer_size=10, seed=1, reshuffle_each_iteration=False)
        with pytest.raises(ValueError, match="seed"):
            dataset.shuffle()


def test_elements_are_cached():
    calls = []

    def slow(x):
        calls.append(int(x))
        return {"x": np.full(2, x), "list": [np.array(x)]}

    def spoiled(element):
        with pytest.raises(ValueError, match="read-only"):
            element["x"] += 1
        element["list"].append(1)
        return element

    dataset = numbers(4).shuffle(seed=1).map(slow).cache().map(spoiled)
    first = [int(element["x"][0]) for element in dataset.repeat(3)]
    assert first == first[:4] * 3, "the order of the first epoch is kept"
    assert sorted(calls) == [0, 1, 2, 3]
    assert [len(element["list"]) for element in dataset] == [2] * 4
    with pytest.raises(ValueError, match=r"in memory; got the file name '/tmp/cache'"):
        numbers().cache("/tmp/cache")


def test_what_goes_by_number_is_refused_behind_a_filter():
    even = numbers().filter(lambda x: x % 2 == 0)
    for refused in (
        lambda: even.take(2),
        lambda: even.skip(2),
        lambda: even.shard(2, 0),
        lambda: even.map(lambda x: x).enumerate(),
        lambda: even.zip(numbers()),
        lambda: numbers().zip(even),
    ):
        with pytest.raises(ValueError, match="left out by a `filter`"):
            refused()


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda ds: ds.take(-2), ValueError),
        (lambda ds: ds.take(1.0), TypeError),
        (lambda ds: ds.skip("1"), TypeError),
        (lambda ds: ds.skip(True), TypeError),
        (lambda ds: ds.shard(0, 0), ValueError),
        (lambda ds: ds.shard(2, 2), ValueError),
        (lambda ds: ds.shard(2, -1), ValueError),
        (lambda ds: ds.enumerate(None), TypeError),
        (lambda ds: ds.zip([1, 2]), TypeError),
        (lambda ds: ds.zip(ds.to_iter_dataset()), TypeError),
    ],
)
def test_wrong_arguments_are_refused(call, error):
    with pytest.raises(error) as caught:
        call(numbers())
    assert isinstance(caught.value, rx.errors.ReplicaxError)


def test_they_are_distributed_and_resumed(two):
    for dataset in (
        numbers(12).take(10).shuffle(seed=4).batch(4).prefetch(2),
        numbers(12).map(lambda x: x + 1).skip(2).batch(4).cache(),
        numbers(12).zip(numbers(10)).map(sum).batch(4),
    ):
        distributed = two.experimental_distribute_dataset(dataset)
        assert len(distributed) == 3
        whole = shares_of(two, distributed)
        assert [[len(part) for part in step] for step in whole] == [[2, 2], [2, 2], [1, 1]]
        assert [[*first, *second] for first, second in whole] == listed(dataset)
        iterator, resumed = iter(distributed), iter(distributed)
        next(iterator)
        resumed.set_state(iterator.get_state())
        assert shares_of(two, resumed) == whole[1:]
        iterator.close()


def test_batches_right_behind_the_arrays_are_slices(two):
    """No row is stacked, and no thread of Grain is needed."""
    for dataset in (
        numbers().batch(4),
        numbers().take(8).batch(4),
        numbers().shuffle(seed=1).batch(4).repeat(2),
        numbers().shard(2, 1).batch(2).skip(1),
    ):
        iterator = iter(two.experimental_distribute_dataset(dataset))
        next(iterator)
        assert iterator.get_state()["feed"]["source"] == {"next_index": 1}
        iterator.close()
