"""Every kind of source gives the same elements, again and again, and from any point on."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import itertools
import json
import subprocess
import sys
from typing import Any

import grain
import jax
import numpy as np
import pytest
from pipelines import EXAMPLES, RULES, Rows, expected_shares, require, shares_of
from support import equal

import replicax as rx

ROWS = np.arange(22, dtype=np.int32)


def flat(lists: list[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [4, 6, 7, 30])
@pytest.mark.parametrize("rule", RULES)
def test_batches_are_divided_in_order(make, replicas, size, rule):
    strategy = rx.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])
    options = rx.InputOptions(partial_batches=rule)
    dataset = strategy.experimental_distribute_dataset(make(ROWS, size), options)
    expected = expected_shares(ROWS.tolist(), size, replicas, rule)
    assert shares_of(strategy, dataset) == expected
    assert shares_of(strategy, dataset) == expected  # and again


def test_iterators_are_apart(make, two):
    dataset = two.experimental_distribute_dataset(make(ROWS, 8))
    one, other = iter(dataset), iter(dataset)
    first = shares_of(two, [next(one), next(other), next(one)])
    assert first == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2 + [[[8, 9, 10, 11], [12, 13, 14, 15]]]
    assert len(list(one)) == 1
    assert len(list(other)) == 2
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(one)


def test_an_empty_dataset_has_no_steps(make, two):
    dataset = two.experimental_distribute_dataset(make(ROWS[:0], 4))
    assert list(dataset) == []
    with pytest.raises(ValueError, match="is empty"):
        _ = dataset.element_spec


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_batched_by_us(name, two):
    require(name)
    dataset = two.experimental_distribute_dataset(
        EXAMPLES[name](ROWS), rx.InputOptions(global_batch_size=8)
    )
    assert shares_of(two, dataset) == expected_shares(ROWS.tolist(), 8, 2)


def test_the_length_is_known_where_the_source_knows_it(source_name, make, two):
    dataset = two.experimental_distribute_dataset(make(ROWS, 8))
    if source_name in ("grain iter", "generator"):
        assert dataset.cardinality == rx.experimental.UNKNOWN_CARDINALITY == -2
        with pytest.raises(TypeError, match="not known"):
            len(dataset)
    else:
        assert len(dataset) == dataset.cardinality == 3


def test_the_spec_is_that_of_a_full_share(make):
    strategy = rx.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    dataset = strategy.experimental_distribute_dataset(make(np.ones((9, 2), np.float32), 4))
    spec = jax.ShapeDtypeStruct((2, 2), np.float32)
    assert dataset.element_spec == spec
    assert iter(dataset).element_spec == spec


@pytest.mark.parametrize("depth", [1, 3])
def test_resuming_after_any_step(make, two, depth):
    options = rx.InputOptions(experimental_per_replica_buffer_size=depth)
    dataset = two.experimental_distribute_dataset(make(ROWS, 4), options)
    whole = shares_of(two, dataset)
    # Another object of the same data, and another depth, as after a restart.
    other = two.experimental_distribute_dataset(make(ROWS, 4))
    for steps in range(len(whole) + 1):
        iterator = iter(dataset)
        for _ in range(steps):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        iterator.close()
        resumed = iter(other)
        resumed.set_state(state)
        assert resumed.get_state() == state
        assert shares_of(two, resumed) == whole[steps:]


@pytest.mark.parametrize("rule", RULES)
def test_resuming_on_another_number_of_replicas(make, two, rule):
    iterator = iter(two.experimental_distribute_dataset(make(ROWS, 8)))
    next(iterator), next(iterator)
    four = rx.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    options = rx.InputOptions(partial_batches=rule)
    resumed = iter(four.experimental_distribute_dataset(make(ROWS, 8), options))
    resumed.set_state(iterator.get_state())
    iterator.close()
    # In order, the partial batch fills the shares of a full one, which was never seen here.
    assert shares_of(four, resumed) == [
        [[16, 17], [18, 19], [20], [21]] if rule == "even" else [[16, 17], [18, 19], [20, 21], []]
    ]


def test_resuming_in_a_new_process(two, tmp_path):
    dataset = grain.MapDataset.source(Rows(ROWS)).shuffle(seed=5).repeat(2).batch(4)
    iterator = iter(two.experimental_distribute_dataset(dataset))
    seen = [two.gather(next(iterator), axis=0).tolist() for _ in range(3)]
    state = tmp_path / "state.json"
    state.write_text(json.dumps(iterator.get_state()))
    iterator.close()
    script = f"""
        import json, sys, grain, numpy as np, replicax as rx
        strategy = rx.MirroredStrategy(["CPU:0", "CPU:1"])
        options = rx.InputOptions(experimental_per_replica_buffer_size=4)
        dataset = grain.MapDataset.source(np.arange(22, dtype=np.int32))
        dataset = dataset.shuffle(seed=5).repeat(2).batch(4)
        iterator = iter(strategy.experimental_distribute_dataset(dataset, options))
        iterator.set_state(json.load(open({str(state)!r})))
        print([strategy.gather(element, axis=0).tolist() for element in iterator])
    """
    done = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    rest = json.loads(done.stdout)
    assert sorted(flat(seen + rest)) == sorted(ROWS.tolist() * 2)
    whole = [two.gather(e, axis=0).tolist() for e in two.experimental_distribute_dataset(dataset)]
    assert seen + rest == whole


def test_shuffles_of_tf_data_resume_without_a_seed(tensorflow, two):
    def make():
        return tensorflow.data.Dataset.from_tensor_slices(ROWS).shuffle(22).batch(4)

    iterator = iter(two.experimental_distribute_dataset(make()))
    seen = [two.gather(next(iterator), axis=0).tolist() for _ in range(2)]
    resumed = iter(two.experimental_distribute_dataset(make()))
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))
    rest = [two.gather(element, axis=0).tolist() for element in iterator]
    assert [two.gather(element, axis=0).tolist() for element in resumed] == rest
    assert sorted(flat(seen + rest)) == ROWS.tolist()


def test_tf_data_that_runs_python_resumes_by_reading_again(tensorflow, two):
    dataset = tensorflow.data.Dataset.from_generator(
        lambda: iter(ROWS), output_signature=tensorflow.TensorSpec((), tensorflow.int32)
    ).batch(4)
    iterator = iter(two.experimental_distribute_dataset(dataset))
    next(iterator)
    resumed = iter(two.experimental_distribute_dataset(dataset))
    with pytest.warns(rx.errors.InexactResumption, match="could not write its state"):
        resumed.set_state(iterator.get_state())
    assert shares_of(two, resumed) == shares_of(two, iterator)


@pytest.mark.parametrize("seeded", [False, True])
def test_shuffles_of_torch_resume(torch, two, seeded):
    def make():
        generator = torch.Generator().manual_seed(3) if seeded else None
        return torch.utils.data.DataLoader(
            Rows(torch.arange(22)), batch_size=4, shuffle=True, generator=generator
        )

    iterator = iter(two.experimental_distribute_dataset(make()))
    seen = [two.gather(next(iterator), axis=0).tolist() for _ in range(2)]
    state = json.loads(json.dumps(iterator.get_state()))
    rest = [two.gather(element, axis=0).tolist() for element in iterator]
    torch.rand(5)  # what happens to the random state in between does not matter
    before = torch.get_rng_state()
    resumed = iter(two.experimental_distribute_dataset(make()))
    resumed.set_state(state)
    assert [two.gather(element, axis=0).tolist() for element in resumed] == rest
    assert sorted(flat(seen + rest)) == list(range(22))
    assert torch.equal(torch.get_rng_state(), before), "resuming changed the random state"


def test_torch_tensors_of_every_dtype(torch, two):
    rows = [
        torch.arange(4).to(dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.bool)
    ]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=4)
    (element,) = two.experimental_distribute_dataset(loader)
    for leaf, tensor in zip(element, rows, strict=True):
        assert str(leaf.whole.dtype) == str(tensor.dtype).removeprefix("torch.")
        equal(leaf.whole.astype(np.float32), tensor.float().numpy())


def test_tf_data_that_is_not_dense_is_refused(tensorflow, two):
    ragged = tensorflow.ragged.constant([[1], [2, 3]])
    dataset = tensorflow.data.Dataset.from_tensors(ragged)
    with pytest.raises(TypeError, match="RaggedTensor"):
        next(iter(two.experimental_distribute_dataset(dataset)))


def test_strings_of_tf_data_stay_on_the_host(tensorflow, two):
    dataset = tensorflow.data.Dataset.from_tensor_slices((["a", "b"], [1, 2])).batch(2)
    ((words, numbers),) = two.experimental_distribute_dataset(dataset)
    assert [part.tolist() for part in words.values] == [[b"a"], [b"b"]]
    assert isinstance(numbers.values[0], jax.Array)
    # A program cannot take them; the function runs all the same.
    lengths = two.run(rx.function(lambda w, n: n + len(w[0])), args=(words, numbers))
    assert shares_of(two, [lengths]) == [[[2], [3]]]


Pair = collections.namedtuple("Pair", ["image", "label"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Example:
    image: object
    label: object


@pytest.mark.parametrize(
    "nest",
    [
        lambda x, y: (x, y),
        lambda x, y: {"image": x, "more": {"label": y}},
        Pair,
        Example,
        lambda x, y: [x, (y, None)],
    ],
)
@pytest.mark.parametrize("rows", [4, 3])
def test_nests_keep_their_structure(nest, rows, two):
    x, y = np.arange(8.0, dtype=np.float32).reshape(4, 2)[:rows], np.arange(rows)
    (element,) = two.experimental_distribute_dataset([nest(x, y)])
    assert jax.tree.structure(element) == jax.tree.structure(nest(0, 0))
    images, labels = jax.tree.leaves(element)
    assert shares_of(two, [labels]) == [[[0, 1], list(range(2, rows))]]
    equal(two.gather(images, axis=0), x)
    spec = jax.tree.leaves(two.experimental_distribute_dataset([nest(x, y)]).element_spec)
    assert [leaf.shape for leaf in spec] == [(2, 2), (2,)]


def test_arrays_in_memory_are_a_grain_dataset():
    images, labels = np.arange(20.0).reshape(10, 2), np.arange(10)
    dataset = rx.from_tensor_slices({"image": images, "label": labels})
    assert isinstance(dataset, grain.MapDataset)
    assert len(dataset) == 10
    assert dataset[3]["label"] == 3
    assert [b["label"].tolist() for b in dataset[1::4].batch(2)] == [[1, 5], [9]]
    assert [b["label"].tolist() for b in dataset.batch(4, drop_remainder=True)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    shuffled = dataset.shuffle(seed=1).batch(4).repeat(2)
    epochs = [np.concatenate([b["label"] for b in list(shuffled)[i : i + 3]]) for i in (0, 3)]
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(10))
    assert epochs[0].tolist() != epochs[1].tolist()
    again = [b["label"].tolist() for b in dataset.shuffle(seed=1).batch(4)]
    assert flat(again) == epochs[0].tolist()
    # What Grain has and these shortcuts have not still works.
    assert len(dataset.map(lambda row: row["label"]).filter(lambda n: n % 2)) == 10
    summed = dataset.batch(5, batch_fn=lambda rows: sum(int(row["label"]) for row in rows))
    assert list(summed) == [10, 35]
    reshuffled = dataset.shuffle(seed=1).shuffle(seed=2)[2:7].batch(3)
    assert [len(b["label"]) for b in reshuffled] == [3, 2]
    with pytest.raises(ValueError, match="batch_size must be positive"):
        dataset.batch(0)


def test_batches_of_arrays_do_not_show_later_writes(two):
    rows = np.zeros(8, np.float32)
    dataset = two.experimental_distribute_dataset(rx.from_tensor_slices(rows).batch(4))
    element = next(iterator := iter(dataset))
    rows[:] = 7
    assert shares_of(two, [element]) == [[[0, 0], [0, 0]]]
    iterator.close()
    batch = rx.from_tensor_slices(rows).batch(4)[0]
    with pytest.raises(ValueError, match="read-only"):
        batch[0] = 1


def test_dtypes_are_those_that_jax_would_make(two):
    (element,) = two.experimental_distribute_dataset([(np.ones(2), np.arange(2))])
    assert [leaf.whole.dtype for leaf in element] == [np.float32, np.int32]
    with jax.enable_x64(True):
        (element,) = two.experimental_distribute_dataset([(np.ones(2), np.arange(2))])
    assert [leaf.whole.dtype for leaf in element] == [np.float64, np.int64]


def test_a_filtered_grain_dataset(two):
    dataset = grain.MapDataset.range(12).filter(lambda n: n % 3 == 0)
    distributed = two.experimental_distribute_dataset(dataset.to_iter_dataset().batch(2))
    assert shares_of(two, distributed) == [[[0], [3]], [[6], [9]]]


def test_an_infinite_dataset(two):
    dataset = two.experimental_distribute_dataset(grain.MapDataset.range(3).repeat().batch(4))
    iterator = iter(dataset)
    assert shares_of(two, [next(iterator) for _ in range(3)]) == [
        [[0, 1], [2, 0]],
        [[1, 2], [0, 1]],
        [[2, 0], [1, 2]],
    ]
    iterator.close()
    assert dataset.cardinality == rx.experimental.INFINITE_CARDINALITY == -1
    with pytest.raises(TypeError, match="never ends"):
        len(dataset)


def test_repeated_shuffles_of_tf_data_without_a_seed_warn(tensorflow, two):
    tensorflow.random.set_seed(None)  # which Keras sets, in tests of its own

    def make(seed):
        dataset = tensorflow.data.Dataset.range(8).shuffle(8, seed=seed).repeat(2).batch(2)
        return iter(two.experimental_distribute_dataset(dataset))

    iterator, resumed = make(3), make(3)
    for _ in range(5):
        next(iterator)
    resumed.set_state(iterator.get_state())  # no warning
    assert shares_of(two, resumed) == shares_of(two, iterator)
    iterator, resumed = make(None), make(None)
    next(iterator)
    with pytest.warns(rx.errors.InexactResumption, match="shuffles without a seed and repeats"):
        resumed.set_state(iterator.get_state())
    iterator.close()
    resumed.close()


@pytest.mark.parametrize("kind", ["batch sampler", "replacement", "own"])
def test_samplers_of_torch_resume(torch, two, kind):
    class Backwards(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(range(21, -1, -1))

        def __len__(self):
            return 22

    def make():
        data, rows = torch.utils.data, Rows(torch.arange(22))
        generator = torch.Generator().manual_seed(3)
        if kind == "own":
            return data.DataLoader(rows, batch_size=4, sampler=Backwards())
        sampler = data.RandomSampler(
            rows,
            generator=generator,
            replacement=kind == "replacement",
            num_samples=90 if kind == "replacement" else None,
        )
        if kind == "batch sampler":
            return data.DataLoader(rows, batch_sampler=data.BatchSampler(sampler, 4, False))
        return data.DataLoader(rows, batch_size=4, sampler=sampler)

    iterator = iter(two.experimental_distribute_dataset(make()))
    next(iterator)
    state = iterator.get_state()
    resumed = iter(two.experimental_distribute_dataset(make()))
    if kind == "own":
        with pytest.warns(rx.errors.InexactResumption, match="Backwards"):
            resumed.set_state(state)
    else:
        resumed.set_state(state)
    assert shares_of(two, resumed) == shares_of(two, iterator)


def test_states_of_grain_iterators_that_change_them(two):
    class Iterator(grain.DatasetIterator):
        def __init__(self):
            super().__init__()
            self._state = {"next": 0}

        def __next__(self):
            if self._state["next"] == 4:
                raise StopIteration
            self._state["next"] += 1
            return np.full(2, self._state["next"])

        def get_state(self):
            return self._state

        def set_state(self, state):
            self._state = state

    class Dataset(grain.IterDataset):
        def __iter__(self):
            return Iterator()

    iterator = iter(two.experimental_distribute_dataset(Dataset()))
    next(iterator)
    state = iterator.get_state()
    rest = shares_of(two, iterator)
    for _ in range(2):
        resumed = iter(two.experimental_distribute_dataset(Dataset()))
        resumed.set_state(state)
        assert shares_of(two, resumed) == rest
    assert len(rest) == 3
