"""Distributed datasets: their questions and answers, and the input they refuse."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import grain
import jax
import numpy as np
import pytest
from pipelines import BY_ROWS, RULES, expected_shares, shares_of

import replicax as rx

ROWS = np.arange(10, dtype=np.int32)


def test_every_strategy_divides_the_batch(strategy):
    rows = rx.from_tensor_slices(ROWS).batch(10)
    (element,) = strategy.experimental_distribute_dataset(rows, BY_ROWS)
    (expected,) = expected_shares(ROWS.tolist(), 10, strategy.num_replicas_in_sync)
    assert np.concatenate(expected).tolist() == ROWS.tolist()
    local = [expected[replica] for replica in strategy.topology.local_replicas]
    assert shares_of(strategy, [element]) == [local]
    devices = [part.devices() for part in strategy.experimental_local_results(element)]
    topology = strategy.topology
    assert devices == [set(topology.devices[replica]) for replica in topology.local_replicas]
    if strategy.num_replicas_in_sync == 1:
        assert isinstance(element, jax.Array), "with one replica, values are plain"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("last", [1, 3, 8, 20])
def test_every_strategy_divides_a_partial_batch(strategy, rule, last):
    rows = np.arange(24 + last, dtype=np.int32)
    options = dataclasses.replace(BY_ROWS, partial_batches=rule)
    dataset = strategy.experimental_distribute_dataset(
        rx.from_tensor_slices(rows).batch(24), options
    )
    expected = expected_shares(rows.tolist(), 24, strategy.num_replicas_in_sync, rule)
    local = strategy.topology.local_replicas
    assert shares_of(strategy, dataset) == [[step[i] for i in local] for step in expected]
    # As elements know the shapes of all replicas, they can be put together again.
    gathered = [strategy.gather(element, axis=0).tolist() for element in dataset]
    assert gathered == [rows[:24].tolist(), rows[24:].tolist()]


def test_from_function(two):
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        rows = grain.MapDataset.source(ROWS)
        rows = rows[context.input_pipeline_id :: context.num_input_pipelines]
        return rows.batch(context.get_per_replica_batch_size(4))

    for name in (
        "distribute_datasets_from_function",
        "experimental_distribute_datasets_from_function",
    ):
        contexts.clear()
        dataset = getattr(two, name)(dataset_fn)
        assert contexts == [rx.InputContext(1, 0, 2)]
        assert len(dataset) == 3
        for _ in range(2):
            # Every replica takes one element a step; in the last step there is one only.
            assert shares_of(two, dataset) == [
                [[0, 1], [2, 3]],
                [[4, 5], [6, 7]],
                [[8, 9], []],
            ]
        assert dataset.element_spec == jax.ShapeDtypeStruct((2,), np.int32)
    assert len(contexts) == 1


def test_from_function_per_replica(two):
    def dataset_fn(context):
        assert (context.num_input_pipelines, context.num_replicas_in_sync) == (2, 2)
        return [np.full(2, 10 * context.input_pipeline_id + i) for i in range(3)][
            : 3 - context.input_pipeline_id
        ]

    options = rx.InputOptions(experimental_replication_mode="PER_REPLICA")
    dataset = two.distribute_datasets_from_function(dataset_fn, options)
    expected = [[[0, 0], [10, 10]], [[1, 1], [11, 11]], [[2, 2], []]]
    assert shares_of(two, dataset) == expected
    assert len(dataset) == 3
    for done in range(4):
        iterator = iter(dataset)
        for _ in range(done):
            next(iterator)
        resumed = iter(dataset)
        resumed.set_state(iterator.get_state())
        iterator.close()
        assert shares_of(two, resumed) == expected[done:]


def test_from_function_may_fill_the_same_array_again(two):
    def refilled():
        row = np.zeros(2)
        for number in range(4):
            row[:] = number
            yield row

    dataset = two.distribute_datasets_from_function(lambda context: refilled)
    assert shares_of(two, dataset) == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]


def test_from_function_of_single_numbers(two):
    dataset = two.distribute_datasets_from_function(lambda context: list(range(4)))
    assert shares_of(two, dataset) == [[0, 1], [2, 3]]
    dataset = two.distribute_datasets_from_function(lambda context: list(range(3)))
    iterator = iter(dataset)
    next(iterator)
    with pytest.raises(ValueError, match="ended in the middle of a step"):
        next(iterator)


def test_elements_can_stay_on_the_host(two):
    options = rx.InputOptions(experimental_fetch_to_device=False)
    dataset = two.experimental_distribute_dataset(rx.from_tensor_slices(ROWS).batch(10), options)
    (element,) = dataset
    assert all(type(part) is np.ndarray for part in element.values)
    assert shares_of(two, [element]) == [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]]
    for run in (two.run, lambda fn, args: two.run(rx.function(fn), args)):
        doubled = run(lambda x: x * 2, args=(element,))
        assert shares_of(two, [doubled]) == [[[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]]


def test_a_dataset_on_the_device_is_read_once(two):
    reads = []

    def dataset_fn(context):
        def batches():
            for number in range(3):
                reads.append(number)
                yield np.full(2, number)

        return batches

    options = rx.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode="per_replica",
        experimental_place_dataset_on_device=True,
    )
    dataset = two.distribute_datasets_from_function(dataset_fn, options)
    first = list(dataset)
    assert len(reads) == 6
    second = list(dataset)
    assert len(reads) == 6
    assert all(one is other for one, other in zip(first, second, strict=True))
    devices = [part.devices() for part in first[0].values]
    assert devices == [{device} for device in two.extended.worker_devices]
    iterator = iter(dataset)
    next(iterator)
    resumed = iter(dataset)
    resumed.set_state(iterator.get_state())
    assert list(resumed) == first[1:]

    @rx.function
    def step(iterator):
        return two.reduce("SUM", next(iterator), axis=0)

    iterator = iter(dataset)
    assert [float(step(iterator)) for _ in range(3)] == [0, 4, 8]
    with pytest.raises(StopIteration):
        step(iterator)


def test_get_next_and_optionals(two):
    dataset = two.experimental_distribute_dataset([np.arange(2), np.arange(2, 4)])
    iterator = iter(dataset)
    assert isinstance(iterator, rx.DistributedIterator)
    assert iter(iterator) is iterator
    assert shares_of(two, [iterator.get_next()]) == [[[0], [1]]]
    optional = iterator.get_next_as_optional()
    assert isinstance(optional, rx.experimental.Optional)
    assert optional.has_value()
    assert shares_of(two, [optional.get_value()]) == [[[2], [3]]]
    for _ in range(2):
        nothing = iterator.get_next_as_optional()
        assert not nothing.has_value()
        assert repr(nothing) == "Optional()"
        with pytest.raises(ValueError, match="has_value"):
            nothing.get_value()
    with pytest.raises(StopIteration):
        iterator.get_next()


def test_the_spec_is_not_taken_from_a_resumed_pass(two):
    batches = [np.zeros((4, 2)), np.zeros((3, 2))]
    iterator = iter(two.experimental_distribute_dataset(batches))
    next(iterator)
    resumed = iter(two.experimental_distribute_dataset(batches))
    resumed.set_state(iterator.get_state())
    assert next(resumed).values[1].shape == (1, 2)
    assert resumed.element_spec.shape == (2, 2)
    iterator.close()


def test_a_batch_larger_than_the_first_sets_the_shares_anew(two):
    batches = [np.arange(2), np.arange(6), np.arange(3)]
    dataset = two.experimental_distribute_dataset(batches)
    assert shares_of(two, dataset) == [[[0], [1]], [[0, 1, 2], [3, 4, 5]], [[0, 1], [2]]]
    options = rx.InputOptions(partial_batches="in_order")
    dataset = two.experimental_distribute_dataset(batches, options)
    assert shares_of(two, dataset) == [[[0], [1]], [[0, 1, 2], [3, 4, 5]], [[0, 1, 2], []]]


def test_batches_may_differ_in_other_dimensions(two):
    batches = [np.zeros((2, 3)), np.zeros((2, 5))]
    shapes = [x.values[0].shape for x in two.experimental_distribute_dataset(batches)]
    assert shapes == [(1, 3), (1, 5)]


def test_a_batch_without_rows(two):
    (element,) = two.experimental_distribute_dataset([np.zeros((0, 3))])
    assert [part.shape for part in element.values] == [(0, 3)] * 2
    total = two.run(rx.function(lambda x: x.sum()), args=(element,))
    assert float(two.reduce("SUM", total, axis=None)) == 0


def test_make_numpy_dataset(two):
    with pytest.warns(DeprecationWarning, match="from_tensor_slices"):
        dataset = two.experimental_make_numpy_dataset({"x": np.ones((10, 2)), "y": ROWS})
    assert isinstance(dataset, grain.MapDataset)
    assert len(dataset) == 10
    (element,) = two.experimental_distribute_dataset(dataset.batch(10))
    assert shares_of(two, [element["y"]]) == [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]]
    numbers = rx.from_tensor_slices([1.0, 2.0, 3.0])
    assert [float(row) for row in numbers] == [1, 2, 3]
    assert len(rx.from_tensor_slices([np.zeros(3), np.ones(3)])) == 3
    for arrays in ({}, (np.ones(2), np.ones(3)), np.float32(1)):
        with pytest.raises(ValueError, match="batch"):
            rx.from_tensor_slices(arrays)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (lambda: iter([np.zeros(2)]), "only once"),
        (lambda: (x for x in [np.zeros(2)]), "only once"),
        (lambda: np.zeros((4, 2)), r"an array of shape \(4, 2\)"),
        (lambda: {"x": np.zeros(4)}, r"with the keys \['x'\]"),
        (lambda: (np.zeros((4, 2)), np.zeros(4)), r"of shapes \(4, 2\), \(4,\)"),
        (lambda: 3, "int is no dataset"),
        (lambda: "words", "str is no dataset"),
        (lambda: None, "NoneType is no dataset"),
        (lambda: list, "type is no dataset"),
    ],
)
def test_what_is_no_dataset_is_refused(two, dataset, message):
    with pytest.raises(TypeError, match=message):
        two.experimental_distribute_dataset(dataset())
    with pytest.raises(TypeError, match=message):
        two.distribute_datasets_from_function(lambda context: dataset())


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([np.float32(1)], ValueError, r"without rows; got array: \(\)"),
        (
            [{"x": np.zeros(2), "y": 1.0}],
            ValueError,
            r"without rows at \['y'\]; got \['x'\]: \(2,\), \['y'\]: \(\)",
        ),
        ([{"x": np.zeros(2), "y": np.zeros(3)}], ValueError, "different numbers of rows"),
        ([{}], ValueError, "no arrays"),
        ([np.zeros(2), (np.zeros(2), np.zeros(2))], ValueError, "of one kind"),
        ([np.zeros((2, 3)), np.zeros(2)], ValueError, r"arrays of \[2\] dimensions.*\[1\]"),
    ],
)
def test_elements_that_cannot_be_divided_are_refused(two, batches, error, message):
    with pytest.raises(error, match=message):
        list(two.experimental_distribute_dataset(batches))


ELEMENTS = [
    [np.float32(1), np.float32(2)],
    [{"x": np.zeros((2, 3), np.float32), "y": np.float32(5)}],
    [{"x": np.zeros((2, 3), np.float32), "y": np.zeros(3, np.float32)}] * 2,
    [np.zeros((0, 3), np.float32)],
    [(np.zeros((0, 3), np.float32), np.int32(7))],
    [{}, {}],
]


@pytest.mark.parametrize("elements", ELEMENTS)
@pytest.mark.parametrize("make", [rx.get_strategy, lambda: rx.MirroredStrategy(["CPU:1"])])
def test_one_replica_gets_elements_as_they_are(make, elements):
    strategy = make()
    dataset = strategy.experimental_distribute_dataset(elements)
    seen = list(dataset)
    assert jax.tree.structure(seen) == jax.tree.structure(elements)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(seen))
    jax.tree.map(np.testing.assert_array_equal, seen, elements)
    assert dataset.element_spec == jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), elements[0]
    )
    step = rx.function(lambda iterator: next(iterator))
    iterator = iter(dataset)
    jax.tree.map(np.testing.assert_array_equal, step(iterator), elements[0])
    resumed = iter(dataset)
    resumed.set_state(iterator.get_state())
    assert len(list(resumed)) == len(elements) - 1
    iterator.close()


def test_a_function_that_returns_no_iterator_is_refused(two):
    with pytest.raises(TypeError, match="must return an iterator"):
        next(iter(two.experimental_distribute_dataset(lambda: 3)))


def test_options_are_checked():
    for arguments, error in [
        ({"experimental_per_replica_buffer_size": 0}, ValueError),
        ({"experimental_per_replica_buffer_size": 1.5}, TypeError),
        ({"experimental_per_replica_buffer_size": True}, TypeError),
        ({"experimental_fetch_to_device": "no"}, TypeError),
        ({"auto_shard_policy": "SOMETIMES"}, ValueError),
        ({"experimental_replication_mode": "PER_PERSON"}, ValueError),
        ({"partial_batches": "padded"}, ValueError),
        ({"partial_batches": None}, ValueError),
        ({"global_batch_size": 0}, ValueError),
        ({"experimental_place_dataset_on_device": True}, ValueError),
        (
            {
                "experimental_place_dataset_on_device": True,
                "experimental_replication_mode": "PER_REPLICA",
            },
            ValueError,
        ),
    ]:
        with pytest.raises(error):
            rx.InputOptions(**arguments)


def test_options_that_have_no_meaning_are_refused(two):
    per_replica = rx.InputOptions(experimental_replication_mode="PER_REPLICA")
    with pytest.raises(ValueError, match="distribute_datasets_from_function"):
        two.experimental_distribute_dataset([np.zeros(2)], per_replica)
    for method in (two.experimental_distribute_dataset, two.distribute_datasets_from_function):
        with pytest.raises(TypeError, match="InputOptions"):
            method([np.zeros(2)], {"auto_shard_policy": "DATA"})
    with pytest.raises(ValueError, match="get_per_replica_batch_size"):
        two.distribute_datasets_from_function(
            lambda context: [np.zeros(2)], rx.InputOptions(global_batch_size=2)
        )
    with pytest.raises(TypeError, match="must be a function"):
        two.distribute_datasets_from_function([np.zeros(2)])
    dataset = two.experimental_distribute_dataset([np.zeros(2)])
    for distributed in (dataset, iter(dataset)):
        with pytest.raises(TypeError, match="distributed already"):
            two.experimental_distribute_dataset(distributed)


def test_the_per_replica_batch_size_has_to_divide():
    context = rx.InputContext(num_replicas_in_sync=4)
    assert context.get_per_replica_batch_size(12) == 3
    with pytest.raises(ValueError, match="does not divide over 4 replicas"):
        context.get_per_replica_batch_size(10)
    with pytest.raises(TypeError, match="whole number"):
        context.get_per_replica_batch_size("4")


@pytest.mark.usefixtures("execution")
def test_replicas_cannot_touch_datasets(two):
    dataset = two.experimental_distribute_dataset([np.zeros(2)] * 3)
    iterator = iter(dataset)
    for call in (
        lambda: two.experimental_distribute_dataset([np.zeros(2)]),
        lambda: two.distribute_datasets_from_function(lambda context: [np.zeros(2)]),
        lambda: next(iterator),
        iterator.get_next_as_optional,
    ):
        with pytest.raises(RuntimeError, match="cross-replica context"):
            two.run(call)
    assert len(list(iterator)) == 3


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"steps": 1},
        {"steps": "one", "feed": None},
        {"steps": -1, "feed": None},
        {"steps": 1, "feed": {}, "more": 2},
        {"steps": 1, "feed": {"wrong": 1}},
        {
            "steps": 1,
            "feed": {
                "source": {"wrong": 1},
                "full_rows": 2,
                "rows_of_batch": 0,
                "steps_of_batch": 0,
            },
        },
        {"steps": 1, "feed": {"sources": [None, None]}},
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(two, state):
    iterator = iter(two.experimental_distribute_dataset([np.full(2, i) for i in range(3)]))
    next(iterator)
    before = iterator.get_state()
    with pytest.raises(ValueError, match="state"):
        iterator.set_state(state)
    assert iterator.get_state() == before
    assert shares_of(two, iterator) == [[[1], [1]], [[2], [2]]]


def test_setting_a_state_goes_back_too(two):
    iterator = iter(two.experimental_distribute_dataset([np.full(2, i) for i in range(3)]))
    start = iterator.get_state()
    for _ in range(2):
        assert shares_of(two, iterator) == [[[0], [0]], [[1], [1]], [[2], [2]]]
        iterator.set_state(start)
    iterator.close()
    iterator.set_state(start)  # also of a closed one
    assert len(list(iterator)) == 3


def test_they_cannot_be_pickled_and_show_what_they_are(two):
    dataset = two.experimental_distribute_dataset([np.zeros(2)])
    assert repr(dataset) == "<DistributedDataset: 1 steps over 2 replica(s)>"
    iterator = iter(dataset)
    assert repr(iterator).startswith("<DistributedIterator after 0 step(s)")
    for thing in (dataset, iterator):
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(thing)
        with pytest.raises(TypeError, match="cannot be pickled"):
            copy.deepcopy(thing)


def test_containers_of_a_dataset_on_the_device_can_be_changed(two):
    options = rx.InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode="PER_REPLICA",
        experimental_place_dataset_on_device=True,
    )
    dataset = two.distribute_datasets_from_function(
        lambda context: [{"x": np.zeros(2), "y": np.ones(2)}], options
    )
    for _ in range(3):
        for element in dataset:
            assert element.pop("y").values[0].tolist() == [1, 1]
    with pytest.raises(ValueError, match="never ends"):
        two.distribute_datasets_from_function(
            lambda context: rx.from_tensor_slices(ROWS).repeat().batch(2), options
        )


def test_the_length_of_a_filtered_dataset_is_not_known(two):
    dataset = grain.MapDataset.range(10).filter(lambda n: n % 2 == 0)
    distributed = two.experimental_distribute_dataset(dataset, rx.InputOptions(global_batch_size=2))
    assert shares_of(two, distributed) == [[[0], [2]], [[4], [6]], [[8], []]]
    rows = dataset.map(lambda n: np.array([n, n]))
    for filtered in (distributed, two.experimental_distribute_dataset(rows)):
        with pytest.raises(TypeError, match="not known"):
            len(filtered)
    assert len(list(two.experimental_distribute_dataset(rows))) == 5


def test_rows_of_the_users_arrays_cannot_be_changed(two):
    def double(row):
        row *= 2
        return row

    rows = np.ones((4, 2), np.float32)
    dataset = rx.from_tensor_slices(rows).map(double).batch(2)
    with pytest.raises(ValueError, match="read-only"):
        list(two.experimental_distribute_dataset(dataset))
    assert (rows == 1).all()


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("kind", ["array", "slice", "memmap", "float64", "strings"])
def test_arrays_in_memory_are_safe_from_writes(two, kind, shuffled, tmp_path):
    """Elements share memory with what the dataset keeps, and with nothing else."""
    rows = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    if kind == "memmap":
        rows.tofile(tmp_path / "rows")
        rows = np.memmap(tmp_path / "rows", np.float32, "r+", shape=(64, 16))
    elif kind == "float64":
        rows = rows.astype(np.float64)
    elif kind == "strings":
        rows = rows.astype(str)
    expected = rows.copy()
    dataset = rx.from_tensor_slices(rows)
    if kind == "slice":
        dataset, expected = dataset[1::2], expected[1::2]
    if shuffled:
        dataset = dataset.shuffle(seed=1)
    elements = list(two.experimental_distribute_dataset(dataset.batch(16)))
    rows[...] = rows[::-1].copy()
    seen = np.concatenate([np.asarray(part) for x in elements for part in x.values])
    assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, expected.tolist()))
    assert shuffled or seen.tolist() == expected.tolist()


def test_examples_of_different_shapes_are_refused(two):
    options = rx.InputOptions(global_batch_size=2)
    for examples in ([np.zeros(2), np.zeros(3)], [{"a": 1}, {"b": 1}]):
        with pytest.raises(ValueError, match="one kind and shape"):
            list(two.experimental_distribute_dataset(examples, options))


def test_an_error_of_the_users_dataset_is_not_taken_for_a_bad_state(two):
    class Broken:
        def __init__(self):
            self.broken = False

        def __iter__(self):
            if self.broken:
                raise KeyError("of the user")
            return iter([np.zeros(2)] * 3)

    dataset = Broken()
    iterator = iter(two.experimental_distribute_dataset(dataset))
    next(iterator)
    dataset.broken = True
    with pytest.raises(KeyError, match="of the user"):
        iterator.set_state(iterator.get_state())
    assert len(list(iterator)) == 2
